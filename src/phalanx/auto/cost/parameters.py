"""What the parameters of a layer cost in one way to compute it: exchange of gradients, update, memory (pure).

What travels are the buckets of data parallel, and the gathers and reduce-scatters of sharding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from phalanx.auto.capture.layers import Layers, Way
from phalanx.auto.cost.collectives import Layout
from phalanx.auto.cost.machine_model import STATES, Speed
from phalanx.auto.cost.parallel_config import Arrangement
from phalanx.auto.cost.segment_work import LayerWork
from phalanx.cluster.calibration.figures import Kind, Sharding
from phalanx.plan.rules.tensor import CUT_DIM
from phalanx.plan.shape import ParamShape

BUCKET_BYTES = 25 * 2**20
"""Gradients travel together until they fill this many bytes, as `plan.value.AllReduce` says."""


class Held(NamedTuple):
    """Of the parameters of a layer. Times in seconds."""

    bytes: float
    whole_bytes: float
    """Of parameters and gradients that are whole while the layer runs."""

    exchange_s: float
    gather_s: float
    gather_again_s: float
    moved_s: float
    """Of gradients into their buckets, in every backward pass, and of the host, which hears of each."""

    update_s: float


class ParameterCost:
    """Prices parameters under one arrangement."""

    def __init__(self, layers: Layers, work: LayerWork, arrangement: Arrangement, speed: Speed) -> None:
        self._optimizer, self._work, self._at, self._speed = layers.optimizer, work, arrangement, speed
        whole = sum(param.bytes for param in layers.captured.parameters if param.trainable)
        self._bucket = min(whole, BUCKET_BYTES) or 1

    def of(self, own: Sequence[ParamShape], parts: float, way: Way) -> Held:
        """Return what a layer's parameters cost.

        Args:
            own: Those that no layer before it has.
            parts: Into how many parts they are cut.
            way: How the layer is computed.
        """
        at = self._at
        trained = [param for param in own if param.trainable]
        size, count = sum(param.bytes for param in trained) / parts, sum(param.count for param in trained) / parts
        frozen = sum(param.bytes for param in own if not param.trainable) / parts
        if at.zero and self._speed.host.sharded_s is not None:
            exchange, gather, again, moved = 0.0, self._sharded_s(own, parts), 0.0, 0.0
        else:
            exchange, moved = self._exchanged(trained, size, parts, way)
            gather = self._collective_s("all_gather", size + frozen, parts, at.over_data) if at.zero else 0.0
            again = gather if at.zero == 3 else 0.0
        slices = at.data if at.zero else 1
        state = STATES[self._optimizer] * size / slices
        # A rank's slices stand beside what is gathered; stages keep that, and whole gradients, for a whole step.
        keeps_whole = at.zero in (1, 2) or (at.zero > 0 and at.stages > 1)
        values = (size + frozen) / slices + (size + frozen if keeps_whole else 0.0)
        gradients = size / slices + (size if at.zero and at.stages > 1 else 0.0)
        passing = 0.0 if not at.zero or at.stages > 1 else size + (size + frozen if at.zero == 3 else 0.0)
        update = self._speed.operators.optimizer_s(self._optimizer, count / slices, len(trained))
        return Held(values + gradients + state, passing, exchange, gather, again, moved, update if trained else 0.0)

    def _exchanged(self, trained: Sequence[ParamShape], size: float, parts: float, way: Way) -> tuple[float, float]:
        """Return the seconds of exchanging gradients of so many bytes, and of moving them to where they are sent."""
        at, host = self._at, self._speed.host
        copies = at.data if at.model > 1 or parts == 1 else 1
        added = _added_over_parts(trained, way)
        terms, exchange, moved = sum(param.bytes for param in added), 0.0, 0.0
        if terms and at.zero:
            exchange += self._collective_s("all_reduce", terms / at.data, parts, at.over_model)
        elif terms:
            exchange += self._collective_s("all_reduce", terms, parts, at.over_rows_and_parts)
        sole = size if at.zero else size - terms
        if copies > 1 and sole:
            exchange += self._collective_s("reduce_scatter" if at.zero else "all_reduce", sole, parts, at.over_data)
            moved = self._speed.operators.operator_s("elementwise", sole)
        if host.averaged_s is not None and not at.zero and at.data * at.model > 1:
            whole = [param for param in trained if not _is_cut(param, way)]
            hooked = trained if copies > 1 else added if at.model > 1 else whole
            moved += len(hooked) * host.averaged_s(at.over_data if at.data > 1 else at.over_model)
        # Stages average once a step, after all micro-batches.
        return (exchange + moved, 0.0) if at.stages > 1 else (exchange, moved)

    def _collective_s(self, kind: Kind, size: float, parts: float, where: Layout) -> float:
        """Return the seconds of so many bytes as a part of buckets, which parameters in parts fill less."""
        bucket = self._bucket / parts
        return self._speed.collective_s(kind, bucket, where) * size / bucket

    def _sharded_s(self, own: Sequence[ParamShape], parts: float) -> float:
        """Return what sharding adds to a step for parameters cut into so many parts, as parts of their units."""
        sharded_s, where = self._speed.host.sharded_s, self._at.over_data
        assert sharded_s is not None
        how: Sharding = "freed" if self._at.zero == 3 and self._at.stages == 1 else "kept"
        seconds = 0.0
        for param in own:
            unit = self._work.unit_of[param.name]
            started, whole = sharded_s(how, 0.0, len(unit), where), sum(one.bytes for one in unit)
            seconds += started / len(unit)
            seconds += (sharded_s(how, whole, len(unit), where) - started) * param.bytes / whole / parts
        return seconds


def _is_cut(param: ParamShape, way: Way) -> bool:
    """Return whether each rank has a part of a parameter of a layer."""
    return way.style in CUT_DIM and (way.style == "column" or len(param.shape) == 2)


def _added_over_parts(params: Iterable[ParamShape], way: Way) -> list[ParamShape]:
    """Return whole parameters of whose gradients each rank has a term, as it sees some of the tokens."""
    if way.style == "sequence":
        return list(params)
    if way.style == "row" and way.gives == "tokens":
        return [param for param in params if len(param.shape) == 1]
    return []
