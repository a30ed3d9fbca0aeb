"""`Candidate`: the fastest Plan under one parallel config, with its step time by category (pure)."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from phalanx.auto.capture.layers import WHOLE, Layers, LayerStrategy
from phalanx.auto.cost.layer_work import LayerWork
from phalanx.auto.cost.parallel_config import ParallelConfig
from phalanx.auto.planner.assignment import Assignment, list_call_costs
from phalanx.auto.planner.strategies import ConfigProblem
from phalanx.auto.solver.problem import Solution, StepProblem
from phalanx.i18n import Labels, tr

_STEP_PARTS: Labels = {
    "compute": "compute",
    "collectives of layers": "collectives of layers",
    "sharding": "sharding",
    "exchange of gradients": "gradient synchronisation",
    "optimizer": "optimizer",
    "stages": "waits of stages",
}
"""What the parts of a planned step are called."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate(Assignment):
    """The fastest Plan under one parallel config."""

    strategies: Mapping[str, LayerStrategy]
    """How layers are computed, by path; those that are not named stand as they are."""

    step_time_s: float
    memory_bytes: float
    """Of the peak rank."""

    parts: Mapping[str, float]
    """Seconds of a step by cause; gradient synchronisation counts where nothing else runs beside it."""

    bound: float
    """Seconds that nothing under this parallel config beats."""

    shares: tuple[int, ...] = ()
    """Units of a global batch that each rank gets, where ranks are unequal; empty where the parts are even."""

    share_unit: Literal["samples", "replicas"] = "samples"
    share_names: tuple[str, ...] = field(default=(), compare=False)
    """The device of each rank, of shares."""

    work: LayerWork | None = field(default=None, compare=False)
    """Of the model on the slowest rank, of shares."""

    @property
    def sharded_layers(self) -> dict[str, LayerStrategy]:
        """The layers with a style."""
        return {path: strategy for path, strategy in self.strategies.items() if strategy.style is not None}

    def part_label(self, part: str) -> str:
        """Return the name of a part, in the user's language."""
        return tr(_STEP_PARTS[part])

    def is_same_as(self, other: object) -> bool:
        """Return whether another candidate has the same config and strategies."""
        if not isinstance(other, Candidate):
            return False
        return (self.config, self.strategies, self.shares) == (other.config, other.strategies, other.shares)

    def describe_shares(self) -> str:
        """Return how many units the ranks of each device get, such as `4 x H100: 24 each, 4 x A100: 8 each`."""
        counts = Counter(zip(self.share_names, self.shares, strict=True))
        return ", ".join(f"{ranks} x {name}: {size} each" for (name, size), ranks in counts.items())

    def __str__(self) -> str:
        return str(self.config) + (f" balance={self.share_unit}" if self.shares else "")


def build_candidate(
    work: LayerWork, config: ParallelConfig, config_problem: ConfigProblem, solution: Solution
) -> Candidate:
    """Return what a solution of the problem of a parallel config stands for."""
    layers = work.layers
    strategies = tuple(
        config_problem.strategies[str(call.template)][solution.pick[str(call.template)]] for call in layers.calls
    )
    by_path = {call.path: strategy for call, strategy in zip(layers.calls, strategies, strict=True) if not call.is_glue}
    stages = _stage_starts(layers, solution.stage_of)
    layers_s = None
    if config.zero:  # what passes wait for has collectives of sharding in it
        unsharded = Assignment(config=replace(config, zero=0), call_strategies=strategies, stages=stages)
        layers_s = sum(cost.comm_s for cost in list_call_costs(unsharded, work))
    return Candidate(
        config=config,
        call_strategies=strategies,
        strategies={path: strategy for path, strategy in by_path.items() if strategy != WHOLE},
        stages=stages,
        step_time_s=solution.seconds,
        memory_bytes=config_problem.problem.peak(solution.pick, solution.stage_of),
        parts=_compute_breakdown(config_problem.problem, solution, config.zero > 0, layers_s),
        bound=solution.bound,
    )


def _stage_starts(layers: Layers, stage_of: tuple[int, ...]) -> tuple[str, ...]:
    if layers.partition_points is None:
        return ()
    pairs = enumerate(itertools.pairwise(stage_of), start=1)
    return tuple(layers.partition_points.starts[piece] for piece, (before, after) in pairs if before != after)


def _compute_breakdown(
    problem: StepProblem, solution: Solution, is_sharded: bool, layers_s: float | None
) -> dict[str, float]:
    """Return the seconds of a step by what takes them; of stages, what an average rank does.

    With sharding, all that ranks exchange for it is one part: parameters they gather, and gradients they reduce into
    slices.

    Args:
        problem: What could be chosen.
        solution: What was.
        is_sharded: Whether it shards.
        layers_s: Seconds of collectives of layers; those of all collectives that passes wait for when None.
    """
    costs, ranks = problem.list_costs(solution.pick), problem.ranks
    passes_per_rank = problem.micro_batches / ranks
    comm_s = sum(cost.comm_s for cost in costs)
    update_s = sum(cost.update_s for cost in costs)
    passes_s = sum(cost.forward_s + cost.backward_s for cost in costs)
    layers_s = comm_s if layers_s is None else min(comm_s, layers_s)
    if problem.stages == 1:  # what runs beside the backward passes does not count
        grad_sync_s = solution.seconds - passes_s - update_s
    else:
        grad_sync_s = sum(cost.grad_sync_s for cost in costs) / ranks
    parts = {
        "compute": passes_per_rank * (passes_s - comm_s),
        "collectives of layers": passes_per_rank * layers_s,
        "sharding": passes_per_rank * (comm_s - layers_s) + (grad_sync_s if is_sharded else 0.0),
        "exchange of gradients": 0.0 if is_sharded else grad_sync_s,
        "optimizer": update_s / ranks,
    }
    return {**parts, "stages": 0.0 if problem.stages == 1 else solution.seconds - sum(parts.values())}
