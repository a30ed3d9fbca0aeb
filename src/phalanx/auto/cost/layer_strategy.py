"""What it costs to compute a part of a model in one way: time of both passes, and memory (pure).

What travels is what the layers of `parallel/tensor` send; parameters and their gradients are `auto/cost/parameters`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from phalanx.auto.capture.layers import WHOLE, Layers, Way
from phalanx.auto.capture.module_calls import Segment
from phalanx.auto.cost.collectives import Layout
from phalanx.auto.cost.machine_model import Speed
from phalanx.auto.cost.operators import Share, Times
from phalanx.auto.cost.parallel_config import Arrangement
from phalanx.auto.cost.parameters import ParameterCost
from phalanx.auto.cost.segment_work import LayerWork, Work
from phalanx.auto.solver.problem import Option
from phalanx.cluster.calibration.figures import Kind
from phalanx.plan.rules.tensor import CUT_DIM

_TOLD_BYTES = 72
"""Bytes that ranks tell each other of their rows before a layer gathers them."""


class WayCost:
    """Prices ways under one arrangement, segment after segment: a parameter counts where it is met first."""

    def __init__(self, layers: Layers, work: LayerWork, arrangement: Arrangement, speed: Speed) -> None:
        self._work, self._at, self._speed = work, arrangement, speed
        self._parameters = ParameterCost(layers, work, arrangement, speed)
        self._meets = arrangement.over_model if arrangement.model > 1 else arrangement.over_data
        passes = arrangement.micro_batches / arrangement.stages
        self._waits = _waits(passes * work.whole_s(1 / arrangement.row_parts), speed, self._meets)
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
        own = [param for param in work.segment.parameters if param.name not in self._seen]
        held = self._parameters.of(own, 1 / part if way.style in CUT_DIM else 1, way)
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
        apart = self._apart(work, share, times) if at.zero_bubble else _Apart(0.0, 0.0, 0.0)
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

    def _apart(self, work: Work, share: Share, times: Times) -> _Apart:
        """Return what it costs to compute gradients of weights after those of inputs, of a backward pass so long."""
        those = [op for op in work.operators if op.parameters and op.written_bytes and work.trains]
        # Autograd walks twice, which takes the host as long for an operator as to watch it in both passes: 46 us on a
        # processor on which selective recomputation adds 24 us each.
        added = 2 * self._speed.host.selective_op_s * len(those)
        owed = sum(op.written_bytes for op in those) * share.rows * share.outer
        return _Apart(times.weights, added, owed)

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


class _Apart(NamedTuple):
    weights_s: float
    added_s: float
    """Of the host."""

    owed: float
    """Bytes of the gradients of outputs, from which those of weights are computed."""
