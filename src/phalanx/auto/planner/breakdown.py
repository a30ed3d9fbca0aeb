"""The seconds of a step by what takes them (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from phalanx.auto.capture.layers import Layers, LayerStrategy
from phalanx.auto.cost.layer_strategy import LayerCostModel
from phalanx.auto.cost.machine_model import MachineModel
from phalanx.auto.cost.parallel_config import ParallelConfig
from phalanx.auto.cost.segment_work import LayerWork
from phalanx.auto.solver.problem import Solution, StepProblem
from phalanx.i18n import Labels

STEP_PARTS: Labels = {
    "compute": "compute",
    "collectives of layers": "collectives of layers",
    "sharding": "sharding",
    "exchange of gradients": "gradient synchronisation",
    "optimizer": "optimizer",
    "stages": "waits of stages",
}
"""What the parts of a planned step are called."""


def estimate_layer_comm(
    layers: Layers, work: LayerWork, config: ParallelConfig, machine: MachineModel, strategies: Sequence[LayerStrategy]
) -> float:
    """Return the seconds of collectives of layers, those of sharding not among them; of stages, of one micro-batch.

    Args:
        layers: The model.
        work: What its calls take.
        config: Of the ranks.
        machine: How fast they are.
        strategies: How each call is computed.
    """
    cost = LayerCostModel(layers, work, replace(config, zero=0), machine)
    return sum(
        cost.options(work_of_call, (strategy,))[0].comm_s
        for work_of_call, strategy in zip(work.all, strategies, strict=True)
    )


def compute_breakdown(
    problem: StepProblem, solution: Solution, is_sharded: bool, layers_s: float | None
) -> dict[str, float]:
    """Return the seconds of a step by what takes them; of stages, what an average rank does.

    With sharding, all that ranks exchange for it is one part: parameters they gather, and gradients they reduce into
    slices.

    Args:
        problem: What could be chosen.
        solution: What was.
        is_sharded: Whether it shards.
        layers_s: As `estimate_layer_comm` returns it; all collectives that passes wait for when None.
    """
    costs, ranks = problem.list_costs(solution.pick), problem.ranks
    each = problem.micro_batches / ranks
    sent = sum(cost.comm_s for cost in costs)
    update = sum(cost.update_s for cost in costs)
    passes = sum(cost.forward_s + cost.backward_s for cost in costs)
    layers_s = sent if layers_s is None else min(sent, layers_s)
    if problem.stages == 1:  # what runs beside the backward passes does not count
        exchange = solution.seconds - passes - update
    else:
        exchange = sum(cost.grad_sync_s for cost in costs) / ranks
    parts = {
        "compute": each * (passes - sent),
        "collectives of layers": each * layers_s,
        "sharding": each * (sent - layers_s) + (exchange if is_sharded else 0.0),
        "exchange of gradients": 0.0 if is_sharded else exchange,
        "optimizer": update / ranks,
    }
    return {**parts, "stages": 0.0 if problem.stages == 1 else solution.seconds - sum(parts.values())}
