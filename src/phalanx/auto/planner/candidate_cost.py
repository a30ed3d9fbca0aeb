"""A planner's candidate segment by segment: what the picked way of each costs, and which stage it is in (pure)."""

from __future__ import annotations

from dataclasses import replace

from phalanx.auto.capture.layers import Layers
from phalanx.auto.cost.layer_strategy import WayCost
from phalanx.auto.cost.machine_model import Collectives, Host, Speed
from phalanx.auto.cost.segment_work import LayerWork
from phalanx.auto.planner.planner import Candidate
from phalanx.auto.solver.problem import Option


def options_of(candidate: Candidate, layers: Layers, work: LayerWork, speed: Speed) -> tuple[Option, ...]:
    """Return what each segment costs as the candidate computes it; of stages, one micro-batch.

    Args:
        candidate: What the planner chose.
        layers: The model it chose for.
        work: What its segments take.
        speed: How fast the ranks are.
    """
    cost = WayCost(layers, work, candidate.arrangement, speed)
    return tuple(cost.options(one, (way,))[0] for one, way in zip(work.all, candidate.picked, strict=True))


def collectives_of(
    candidate: Candidate, layers: Layers, speed: Speed, collective_s: Collectives | None = None
) -> tuple[Option, ...]:
    """Return the same with operators and hosts that take no time, so that all seconds are those of collectives.

    Args:
        candidate: What the planner chose.
        layers: The model it chose for.
        speed: How fast the ranks are.
        collective_s: Seconds of collectives, and no more than these; with what starting one takes when None.
    """
    host = (
        replace(speed.host, checkpoint_s=0.0, selective_op_s=0.0, averaged_s=None) if collective_s is None else Host()
    )
    only = replace(speed, operators=_FREE, collective_s=collective_s or speed.collective_s, host=host)
    work = LayerWork(layers.captured, layers.segments, layers.blocks, _FREE)
    return options_of(candidate, layers, work, only)


def stages_of(candidate: Candidate, layers: Layers) -> tuple[int, ...]:
    """Return the stage of each segment; 0 for all of a model without stages."""
    pieces = layers.pieces
    if pieces is None:
        return (0,) * len(layers.segments)
    begins = [pieces.starts.index(start) for start in candidate.stages]
    return tuple(sum(begin <= piece for begin in begins) for piece in pieces.of)


def borders_of(candidate: Candidate, layers: Layers) -> tuple[float, ...]:
    """Return the bytes of a micro-batch that pass from each stage to the next."""
    pieces = layers.pieces
    if pieces is None:
        return ()
    crossing = (pieces.crossing[pieces.starts.index(start) - 1] for start in candidate.stages)
    return tuple(size / candidate.arrangement.row_parts for size in crossing)


class _Free:
    """Operators that take no time."""

    def _no_time(self, *_: object, **__: object) -> float:
        return 0.0

    matmul_s = conv_s = attention_s = operator_s = optimizer_s = _no_time


_FREE = _Free()
