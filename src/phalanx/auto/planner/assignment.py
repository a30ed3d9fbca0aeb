"""What a Plan decides for a captured model, and what each call costs that way (pure)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from phalanx.auto.capture.layers import Layers, LayerStrategy
from phalanx.auto.cost.layer_strategy import LayerCostModel
from phalanx.auto.cost.machine_model import CollectiveTime, HostOverhead, MachineModel
from phalanx.auto.cost.parallel_config import ParallelConfig
from phalanx.auto.cost.segment_work import LayerWork
from phalanx.auto.solver.problem import StrategyCost


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """A parallel config, and a strategy for every call of a module."""

    config: ParallelConfig
    call_strategies: tuple[LayerStrategy, ...]
    """How each call is computed."""

    stages: tuple[str, ...]
    """The units that stages 1, 2, ... of a pipeline begin with."""


def list_call_costs(
    assignment: Assignment, layers: Layers, work: LayerWork, machine: MachineModel
) -> tuple[StrategyCost, ...]:
    """Return what each call costs as the candidate computes it; of stages, one micro-batch.

    Args:
        assignment: What a Plan decides.
        layers: The model it chose for.
        work: What its calls take.
        machine: How fast the ranks are.
    """
    cost = LayerCostModel(layers, work, assignment.config, machine)
    return tuple(
        cost.options(work_of_call, (strategy,))[0]
        for work_of_call, strategy in zip(work.all, assignment.call_strategies, strict=True)
    )


def list_comm_costs(
    assignment: Assignment, layers: Layers, machine: MachineModel, collective_s: CollectiveTime | None = None
) -> tuple[StrategyCost, ...]:
    """Return the same with operators and hosts that take no time, so that all seconds are those of collectives.

    Args:
        assignment: What a Plan decides.
        layers: The model it chose for.
        machine: How fast the ranks are.
        collective_s: Seconds of collectives, and no more than these; with what starting one takes when None.
    """
    host = (
        replace(machine.host, checkpoint_s=0.0, selective_op_s=0.0, averaged_s=None)
        if collective_s is None
        else HostOverhead()
    )
    only = replace(machine, operators=_NO_TIME, collective_s=collective_s or machine.collective_s, host=host)
    work = LayerWork(layers.captured, layers.calls, layers.blocks, _NO_TIME)
    return list_call_costs(assignment, layers, work, only)


def list_stages(assignment: Assignment, layers: Layers) -> tuple[int, ...]:
    """Return the stage of each call; 0 for all of a model without stages."""
    pieces = layers.pieces
    if pieces is None:
        return (0,) * len(layers.calls)
    begins = [pieces.starts.index(start) for start in assignment.stages]
    return tuple(sum(begin <= piece for begin in begins) for piece in pieces.of)


def list_border_bytes(assignment: Assignment, layers: Layers) -> tuple[float, ...]:
    """Return the bytes of a micro-batch that pass from each stage to the next."""
    pieces = layers.pieces
    if pieces is None:
        return ()
    crossing = (pieces.crossing[pieces.starts.index(start) - 1] for start in assignment.stages)
    return tuple(size / assignment.config.batch_parts for size in crossing)


class _NoTime:
    """Operators that take no time."""

    def _no_time(self, *_: object, **__: object) -> float:
        return 0.0

    matmul_s = conv_s = attention_s = operator_s = optimizer_s = _no_time


_NO_TIME = _NoTime()
