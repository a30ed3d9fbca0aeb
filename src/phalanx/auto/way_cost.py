"""What it costs to compute a part of a model in one way: time of both passes, exchange of gradients, memory (pure).

What travels is what the layers of `parallel/tensor` send, the buckets of data parallel, and the gathers and
reduce-scatters of sharding.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from phalanx.auto.arrangement import Arrangement
from phalanx.auto.choices import Option
from phalanx.auto.collective_cost import Layout
from phalanx.auto.layer_work import LayerWork, Work
from phalanx.auto.layers import WHOLE, Layers, Way
from phalanx.auto.operator_cost import Share, Times
from phalanx.auto.rates import STATES, Speed
from phalanx.auto.segments import Segment
from phalanx.cluster.measured import Kind, Sharding
from phalanx.plan.shape import ParamShape
from phalanx.plan.tensor_rules import CUT_DIM

BUCKET_BYTES = 25 * 2**20
"""Gradients travel together until they fill this many bytes, as `plan.value.AllReduce` says."""

_TOLD_BYTES = 72
"""Bytes that ranks tell each other of their rows before a layer gathers them."""


class WayCost:
    """Prices ways under one arrangement, segment after segment: a parameter counts where it is met first."""

    def __init__(self, layers: Layers, work: LayerWork, arrangement: Arrangement, speed: Speed) -> None:
        self._layers, self._work, self._at, self._speed = layers, work, arrangement, speed
        whole = sum(param.bytes for param in layers.captured.parameters if param.trainable)
        self._bucket = min(whole, BUCKET_BYTES) or 1
        self._meets = arrangement.over_model if arrangement.model > 1 else arrangement.over_data
        self._waits = _waits(work.whole_s(1 / arrangement.row_parts), speed, self._meets)
        self._seen: set[str] = set()
        self._known: dict[tuple[object, ...], tuple[Option, ...]] = {}

    def options(self, work: Work, ways: Iterable[Way]) -> tuple[Option, ...]:
        """Return what the ways of the next segment cost."""
        names, chosen = {param.name for param in work.segment.parameters}, tuple(ways)
        key = self._work.alike(work), frozenset(names & self._seen), chosen
        if key not in self._known:
            self._known[key] = tuple(self._option(work, way) for way in chosen)
        self._seen |= names
        return self._known[key]

    def _option(self, work: Work, way: Way) -> Option:
        at = self._at
        ranks = 1 if way == WHOLE else at.model if at.model > 1 else at.data
        own_rows = way.style is not None and at.model == 1
        in_rows = way.style in ("parts", "sequence") or (way.style is None and way.takes == "tokens")
        part = _largest_part(work.segment, way, ranks)
        share = Share(
            rows=1.0 if own_rows else 1 / at.row_parts / (ranks if in_rows else 1),
            outer=part if way.style in ("column", None) and not in_rows else 1.0,
            inner=part if way.style == "row" else 1.0,
        )
        times = self._work.times(work, share)
        sent = self._sent_by_rows(work, way) if own_rows else self._sent(work, way)
        sent, times = self._with_waits(sent, times)
        held = self._held(work.segment, 1 / part if way.style in CUT_DIM else 1, way)
        kept = work.segment.kept_bytes / at.row_parts / (ranks if way.gives != "whole" or way.style == "row" else 1)
        kept += work.taken if own_rows else 0.0
        if way.style == "column" and way.takes == "tokens":
            kept += work.taken / at.row_parts  # put together, and kept for the gradient of the weight
        working, again, selected = work.given / at.row_parts / (ranks if way.gives != "whole" else 1), 0.0, 0.0
        if at.recompute == "selective" and work.in_block:
            selected = len(work.operators) * self._speed.host.selective_op_s
        if at.recompute != "none" and work.in_block:
            again = sent.forward + self._work.again_s(work, share, at.recompute) + selected
            again += self._speed.host.checkpoint_s if work.opens_block else 0.0
            kept = self._kept_of_products(work, share)
            kept += work.taken / at.row_parts if work.opens_block else 0.0
            working += work.kept_inside / at.row_parts  # as if nothing were cut
        apart = self._apart(work, share) if at.zero_bubble else _Apart(0.0, 0.0, 0.0)
        # Stages gather once for all micro-batches of a step, at every stage of sharding.
        before, again_back = (0.0, 0.0) if at.stages > 1 else (held.gather_s, held.gather_again_s)
        return Option(
            label=str(way),
            forward_s=times.forward + sent.forward + selected + before,
            backward_s=times.backward + sent.backward + again + again_back + held.moved_s + apart.added_s,
            weights_s=apart.weights_s,
            sent_s=sent.forward + sent.backward + before + again_back,
            exchange_s=held.exchange_s + (held.gather_s if at.stages > 1 else 0.0),
            update_s=held.update_s,
            held=held.bytes,
            kept=kept,
            owed=apart.owed,
            working=working + held.whole_bytes,
        )

    def _called(self, kind: Kind, size: float, where: Layout) -> float:
        """Return the seconds of a collective of a layer, with what autograd and Python add."""
        host = self._speed.host
        if host.layer_s is not None:
            return host.layer_s(kind, size, where)
        return self._speed.collective_s(kind, size, where) + host.collective_call_s

    def _apart(self, work: Work, share: Share) -> _Apart:
        """Return what it costs to compute gradients of weights after those of inputs."""
        those = [op for op in work.operators if op.parameters and op.written_bytes and work.trains]
        # Autograd walks twice, which takes the host as long for an operator as to watch it in both passes: 46 us on a
        # processor on which selective recomputation adds 24 us each.
        added = 2 * self._speed.host.selective_op_s * len(those)
        owed = sum(op.written_bytes for op in those) * share.rows * share.outer
        return _Apart(self._work.times(work, share).weights, added, owed)

    def _with_waits(self, sent: Times, work: Times) -> tuple[Times, Times]:
        """Return collectives and work of a segment with what ranks wait for the slowest of them after it.

        A segment whose ranks meet in a pass waits itself, in full. Else the next one that meets waits for this work
        too: which one that is depends on what is chosen for others, so the work counts with its part of what ranks
        would wait after a whole step. Collectives before the work find ranks in step, if nothing else was done since
        they last met.
        """
        waiting_s = self._speed.host.waiting_s
        if waiting_s is None:
            return sent, work
        late = 1 + self._waits
        met = Times(
            sent.forward and sent.forward + waiting_s(work.forward, self._meets),
            sent.backward and sent.backward + waiting_s(work.backward, self._meets),
        )
        forward, backward = 1.0 if sent.forward else late, 1.0 if sent.backward else late
        return met, Times(work.forward * forward, work.backward * backward, work.weights * backward)

    def _kept_of_products(self, work: Work, share: Share) -> float:
        if self._at.recompute == "full":
            return 0.0
        return sum(op.written_bytes for op in work.operators if op.flops) * share.rows * share.outer

    def _sent_by_rows(self, work: Work, way: Way) -> Times:
        """Return the collectives of a layer that gathers the rows of all ranks; terms travel to who adds them."""
        ranks, where, said = self._at.data, self._at.over_data, self._called
        taken, given = work.taken, work.given
        told = self._speed.collective_s("all_gather", _TOLD_BYTES * ranks, where) + self._speed.host.collective_call_s
        if way.style == "column":
            exchanged = said("all_to_all", given / ranks, where)
            forward = told + said("all_gather", taken, where) + exchanged
            return Times(forward, exchanged + (0.0 if work.is_first else said("all_to_all", taken, where)))
        exchanged = said("all_to_all", taken / ranks, where)
        forward = told + exchanged + said("all_to_all", given, where)
        return Times(forward, said("all_gather", given, where) + (0.0 if work.is_first else exchanged))

    def _sent(self, work: Work, way: Way) -> Times:
        """Return the collectives of a layer whose ranks read the same rows."""
        if way.style in (None, "sequence"):
            return Times(0.0, 0.0)
        where, said = self._at.over_model, self._called
        taken, given = work.taken / self._at.row_parts, work.given / self._at.row_parts
        if way.style == "parts":
            return self._sent_around_parts(work)
        if way.style == "column":
            forward = 0.0 if way.gives_cut else said("all_gather", given, where)
            if way.takes == "tokens":  # terms of its gradients travel to who adds them
                return Times(forward + said("all_gather", taken, where), said("all_to_all", taken, where))
            return Times(forward, 0.0 if work.is_first else said("all_reduce", taken, where))
        if way.gives == "tokens":
            return Times(said("all_to_all", given, where), said("all_gather", given, where))
        forward = said("all_reduce", given, where)
        whole_taken = way.style == "row" and not way.takes_cut and not work.is_first
        return Times(forward, said("all_gather", taken, where) if whole_taken else 0.0)

    def _sent_around_parts(self, work: Work) -> Times:
        """Return the collectives that put together what is computed in parts: outputs, and gradients of inputs.

        Those of whole parameters are terms. What DTensor adds counts as measured, or
        like recomputation of operators.
        """
        where, said, rows = self._at.over_model, self._called, self._at.row_parts
        host, count = self._speed.host, len(work.operators)
        trained = [param for param in work.segment.parameters if param.trainable]
        watched = 2 * count * host.selective_op_s
        if host.placed_s is not None:
            watched = host.placed_s(count, len(trained), where) / 2
        forward = sum(said("all_gather", output.bytes / rows, where) for output in work.segment.outputs)
        backward = sum(said("all_reduce", param.bytes, where) for param in trained)
        if not work.is_first:
            inputs = (one for one in work.segment.inputs if isinstance(one.source, int))
            backward += sum(said("all_gather", one.value.bytes / rows, where) for one in inputs)
        return Times(forward + watched, backward + watched)

    def _held(self, segment: Segment, parts: float, way: Way) -> _Held:
        """Return what parameters cost that are cut into so many parts in this way."""
        at, said = self._at, self._speed.collective_s
        own = [param for param in segment.parameters if param.name not in self._seen]
        trained = [param for param in own if param.trainable]
        size, count = sum(param.bytes for param in trained) / parts, sum(param.count for param in trained) / parts
        frozen = sum(param.bytes for param in own if not param.trainable) / parts
        copies = at.data if at.model > 1 or parts == 1 else 1
        bucket = self._bucket / parts
        exchange = gather = moved = 0.0
        added = _added_over_parts(trained, way)
        terms = sum(param.bytes for param in added)
        if terms and not at.zero:
            exchange += said("all_reduce", bucket, at.over_rows_and_parts) * terms / bucket
        elif terms:
            exchange += said("all_reduce", bucket, at.over_model) * terms / at.data / bucket
        sole = size if at.zero else size - terms
        if copies > 1 and sole:
            kind: Kind = "reduce_scatter" if at.zero else "all_reduce"
            exchange += said(kind, bucket, at.over_data) * sole / bucket
            moved = self._speed.operators.operator_s("elementwise", sole)
        if self._speed.host.averaged_s is not None and not at.zero and at.data * at.model > 1:
            whole = [param for param in trained if not _is_cut(param, way)]
            hooked = trained if copies > 1 else added if at.model > 1 else whole
            moved += len(hooked) * self._speed.host.averaged_s(at.over_data if at.data > 1 else at.over_model)
        if at.zero and size + frozen:
            gather = said("all_gather", bucket, at.over_data) * (size + frozen) / bucket
        again = gather if at.zero == 3 else 0.0
        if at.zero and self._speed.host.sharded_s is not None:
            exchange, gather, again, moved = 0.0, self._sharded_s(own, parts), 0.0, 0.0
        slices = at.data if at.zero else 1
        state = STATES[self._layers.optimizer] * size / slices
        # A rank's slices stand beside what is gathered; stages keep that, and whole gradients, for a whole step.
        keeps_whole = at.zero in (1, 2) or (at.zero > 0 and at.stages > 1)
        values = (size + frozen) / slices + (size + frozen if keeps_whole else 0.0)
        gradients = size / slices + (size if at.zero and at.stages > 1 else 0.0)
        passing = 0.0 if not at.zero or at.stages > 1 else size + (size + frozen if at.zero == 3 else 0.0)
        update = self._speed.operators.optimizer_s(self._layers.optimizer, count / slices, len(trained))
        return _Held(values + gradients + state, passing, exchange, gather, again, moved, update if trained else 0.0)

    def _sharded_s(self, own: list[ParamShape], parts: float) -> float:
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


def _waits(step_s: float, speed: Speed, where: Layout) -> float:
    """Return what ranks wait for the slowest of them, as a part of their work, if they meet once a step."""
    waiting_s = speed.host.waiting_s
    return 0.0 if waiting_s is None or not step_s else waiting_s(step_s, where) / step_s


def _largest_part(segment: Segment, way: Way, ranks: int) -> float:
    """Return the share of a segment that the rank with the largest part has."""
    weight = next((param for param in segment.parameters if len(param.shape) == 2), None)
    if weight is None or way.style not in CUT_DIM:
        return 1 / ranks
    size = weight.shape[CUT_DIM[way.style]]
    return -(-size // ranks) / size


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


class _Held(NamedTuple):
    bytes: float
    whole_bytes: float
    """Of parameters and gradients that are whole while the layer runs."""

    exchange_s: float
    gather_s: float
    gather_again_s: float
    moved_s: float
    """Of gradients into their buckets, and of the host, which hears of each."""

    update_s: float


class _Apart(NamedTuple):
    weights_s: float
    added_s: float
    """Of the host."""

    owed: float
    """Bytes of the gradients of outputs, from which those of weights are computed."""
