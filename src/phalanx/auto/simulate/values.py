"""Inputs and outputs of the step simulator: `PipelineSpec`, `StageWork`, `Simulation` (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from phalanx.errors import PlanError
from phalanx.plan.pipeline_order import TORCH_RULES, OrderRules
from phalanx.plan.value import Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class PassWork:
    """One micro-batch through one stage, one way. What overlaps within it is already counted."""

    compute: float
    """Seconds of the compute stream."""

    exposed: float = 0.0
    """Seconds in which it waits for collectives."""

    beside: float = 0.0
    """Seconds of collectives hidden behind `compute`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageWork:
    """What one stage does and holds."""

    forward: PassWork
    inputs: PassWork
    """The backward pass without gradients of weights, recomputation included."""

    weights: PassWork
    """Gradients of weights, which `zero_bubble` alone runs apart from `inputs`."""

    activation_bytes: float = 0.0
    """Bytes that a micro-batch keeps from its forward pass to the end of its backward pass."""

    deferred_bytes: float = 0.0
    """Bytes that it keeps besides from `inputs` to the end of `weights`, where these are apart."""

    workspace_bytes: float = 0.0
    """Bytes more while a backward pass runs."""

    gradient_bytes: float = 0.0
    """Bytes of gradients of parameters that are there from the beginning of a backward pass on. Each micro-batch
    adds them: they are of stages that have one, such as layers."""

    send: float = 0.0
    """Seconds to bring activations to the stage after this one, or their gradients back."""

    added_to_first: float = 0.0
    """Seconds by which the forward pass of the first micro-batch is longer: gathers of parameters beside it."""

    buckets: tuple[float, ...] = ()
    """Seconds to reduce each bucket of gradients over the copies of this stage, in the order they become ready."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSpec:
    """One optimizer step, as far as one copy of each stage does it."""

    schedule: Schedule
    ranks: int
    """Size of the stage axis."""

    rules: OrderRules = TORCH_RULES
    """How its software orders passes."""

    stages: tuple[StageWork, ...]
    """`ranks` x `schedule.virtual` of them, in the model's order."""

    persistent_bytes: tuple[float, ...]
    """Bytes that each rank holds throughout: parameters, gradients, optimizer, workspace."""

    optimizer: tuple[float, ...]
    """Seconds of each rank's optimizer step."""

    update_bytes: tuple[float, ...] = ()
    """Bytes more on each rank while its optimizer runs; none when empty."""

    opening: float = 0.0
    """Seconds of collectives before the first pass: the first gather of shards."""

    closing: tuple[float, ...] = ()
    """Seconds of each rank's collectives between its last gradients and its optimizer: the last scatter to shards, sums
    of gradients that several ranks hold. Ranks that have any begin together. Empty: no rank has any."""

    contention: float = 0.0
    """Seconds that communication and computation cost each other for each second they share (auto/constants)."""

    overlaps_sends: bool = True
    holds_receivers: bool = False
    """Whether a rank that takes a send is held up by it as long as the one that sends."""

    overlaps_gradients: bool = True
    waits_contend: bool = False
    """Whether gradients are also slowed beside collectives that passes wait for, as beside computation."""

    copies: int = 1
    """Ranks that hold the same stages and do the same."""

    @property
    def stages_by_rank(self) -> tuple[tuple[int, ...], ...]:
        """The stages that each rank holds."""
        holder = [self.schedule.holder(stage, self.ranks) for stage in range(len(self.stages))]
        return tuple(tuple(s for s, owner in enumerate(holder) if owner == rank) for rank in range(self.ranks))

    def __post_init__(self) -> None:
        stages = self.ranks * self.schedule.virtual
        lengths = [len(self.persistent_bytes), len(self.optimizer), len(self.update_bytes) or self.ranks]
        if len(self.stages) != stages or set(lengths) != {self.ranks}:
            raise PlanError(
                f"{self.ranks} ranks of {self.schedule.virtual} stages need {stages} stages and {self.ranks} values of "
                f"persistent_bytes, optimizer and update_bytes, found {len(self.stages)}, {lengths[0]}, {lengths[1]} "
                f"and {lengths[2]}. Give one of each for every rank; update_bytes may be empty."
            )


class Slice(NamedTuple):
    """Something that a stream of a rank does from `start` to `end`, in seconds of the step."""

    rank: int
    stream: str
    """`compute`, `collectives`, `send` or `gradients`."""

    kind: str
    """F, B, I or W of `plan.pipeline_order.Pass`, `gather`, `last collectives`, `bucket` or `optimizer`."""

    stage: int
    """-1 where it belongs to no stage."""

    microbatch: int
    """-1 where it belongs to none; the number of a bucket."""

    start: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTime:
    """Where the seconds of a rank's step go; they add up to the step."""

    busy: float
    exposed: float
    """Compute waits for collectives, gradients or a send of its own."""

    idle: float
    """Waiting for other stages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """A simulated step."""

    pipeline: PipelineSpec
    step_time_s: float
    ranks: tuple[RankTime, ...]
    slices: tuple[Slice, ...]
    memory: tuple[tuple[tuple[float, float], ...], ...]
    """By rank: seconds, and the bytes held from then on."""

    left_out: int = 0
    """Micro-batches of the steady state that `slices` and `memory` do not show, and everything else counts."""

    @property
    def peaks(self) -> tuple[float, ...]:
        """Bytes of every rank at its fullest."""
        return tuple(max(size for _, size in timeline) for timeline in self.memory)

    @property
    def idle_share(self) -> float:
        """Share of the step that the average rank waits for others."""
        return sum(rank_time.idle for rank_time in self.ranks) / len(self.ranks) / self.step_time_s


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedStep:
    """A simulated step and whose it is."""

    name: str
    simulation: Simulation
    per_s: float
    """Tokens or rows a second of all ranks together; 0 if their number is not known."""

    unit: Literal["tokens", "rows"]
    usd_per_hour: float | None = None
    """Price of all devices; None if it is not known."""

    layers: tuple[str, ...] = ()
    """Names of the stages, where these are the layers of one rank."""

    @property
    def usd_per_step(self) -> float | None:
        """Price of a step on all devices; None if it is not known."""
        return step_price(self.simulation.step_time_s, self.usd_per_hour)

    def facts(self) -> dict[str, Any]:
        """Return what there is to say of the whole step, in plain values."""
        return {
            "run": self.name,
            "step_time_s": self.simulation.step_time_s,
            f"{self.unit}_per_s": self.per_s,
            "usd_per_step": self.usd_per_step,
            "ranks_that_do_the_same": self.simulation.pipeline.copies,
            "microbatches_left_out": self.simulation.left_out,
        }

    def to_json(self) -> dict[str, Any]:
        """Return the step, and where the seconds and bytes of its ranks go, in plain values."""
        ranks = [
            {"stages": stages, "compute_s": rank.busy, "wait_s": rank.exposed, "idle_s": rank.idle, "peak_bytes": peak}
            for stages, rank, peak in zip(
                self.simulation.pipeline.stages_by_rank, self.simulation.ranks, self.simulation.peaks, strict=True
            )
        ]
        return {**self.facts(), "idle_share": self.simulation.idle_share, "ranks": ranks}


def step_price(seconds: float, usd_per_hour: float | None) -> float | None:
    """Return the price of a step, or of anything else that takes so long; None if the hour has none."""
    return None if usd_per_hour is None else usd_per_hour / 3600 * seconds
