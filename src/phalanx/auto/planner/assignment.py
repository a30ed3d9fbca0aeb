"""`Assignment`: a parallel config, a strategy for every layer, the pipeline stages, and what calls cost (pure)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from phalanx.auto.capture.layers import Layers, LayerStrategy
from phalanx.auto.cost.layer_strategy import LayerCostModel
from phalanx.auto.cost.layer_work import LayerWork
from phalanx.auto.cost.machine_model import CollectiveTime, HostOverhead
from phalanx.auto.cost.parallel_config import ParallelConfig
from phalanx.auto.solver.problem import StrategyCost


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """A parallel config, and a strategy for every call of a module."""

    config: ParallelConfig
    call_strategies: tuple[LayerStrategy, ...]
    """How each call is computed."""

    stages: tuple[str, ...]
    """The units that stages 1, 2, ... of a pipeline begin with."""


def list_call_costs(assignment: Assignment, work: LayerWork) -> tuple[StrategyCost, ...]:
    """Return what each call of a model costs as a Plan computes it; of stages, one micro-batch."""
    cost = LayerCostModel(work, assignment.config)
    return tuple(
        cost.options(work_of_call, (strategy,))[0]
        for work_of_call, strategy in zip(work.calls_under(assignment.config), assignment.call_strategies, strict=True)
    )


def list_comm_costs(
    assignment: Assignment, work: LayerWork, collective_s: CollectiveTime | None = None
) -> tuple[StrategyCost, ...]:
    """Return the same with operators and hosts that take no time, so that all seconds are those of collectives.

    Args:
        assignment: What a Plan decides.
        work: Of the model on a machine.
        collective_s: Seconds of collectives, and no more than these; with what starting one takes when None.
    """
    machine = work.machine
    host = (
        replace(machine.host, checkpoint_s=0.0, selective_op_s=0.0, averaged_s=None)
        if collective_s is None
        else HostOverhead()
    )
    only = replace(
        machine,
        operators=_NO_TIME,
        ring_operators=None,
        collective_s=collective_s or machine.collective_s,
        host=host,
    )
    return list_call_costs(assignment, LayerWork(work.layers, only))


def list_stages(assignment: Assignment, layers: Layers) -> tuple[int, ...]:
    """Return the stage of each call; 0 for all of a model without stages."""
    points = layers.partition_points
    if points is None:
        return (0,) * len(layers.calls)
    begins = [points.starts.index(start) for start in assignment.stages]
    return tuple(sum(begin <= piece for begin in begins) for piece in points.of)


def list_border_bytes(assignment: Assignment, layers: Layers) -> tuple[float, ...]:
    """Return the bytes of a micro-batch that pass from each stage to the next."""
    points = layers.partition_points
    if points is None:
        return ()
    crossing = (points.crossing[points.starts.index(start) - 1] for start in assignment.stages)
    return tuple(size / assignment.config.batch_parts for size in crossing)


class _NoTime:
    """Operators that take no time."""

    def _no_time(self, *_: object, **__: object) -> float:
        return 0.0

    matmul_s = conv_s = attention_s = operator_s = optimizer_s = _no_time


_NO_TIME = _NoTime()
