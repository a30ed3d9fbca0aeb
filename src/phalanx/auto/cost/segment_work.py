"""What the segments of a model take to compute, remembered over the arrangements that share it (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from phalanx.auto.capture.blocks import is_inside
from phalanx.auto.capture.graph import Captured, Operator, TensorShape
from phalanx.auto.capture.module_calls import Segment
from phalanx.auto.capture.partition_points import unit_of
from phalanx.auto.cost.machine_model import Operators
from phalanx.auto.cost.operators import Share, Times, times_of
from phalanx.auto.cost.parallel_config import Arrangement, Recompute
from phalanx.auto.solver.problem import fills_s
from phalanx.plan.shape import ModelShape, ParamShape
from phalanx.plan.stages import units


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One segment, as far as no arrangement changes it. Bytes are of a global batch."""

    segment: Segment
    operators: tuple[Operator, ...]
    is_first: bool
    """Whether nobody needs the gradient of its inputs."""

    trains: bool
    """Whether its parameters get gradients."""

    taken: float
    """Bytes of its inputs."""

    given: float
    """Bytes of its outputs."""

    in_block: bool
    """Whether it is in a repeated block, which may be computed again."""

    opens_block: bool
    kept_inside: float
    """On the last segment of a repeated block: bytes of all that the block keeps."""


class LayerWork:
    """The work of all segments in order, and the seconds of parts of it."""

    def __init__(
        self, captured: Captured, found: tuple[Segment, ...], blocks: tuple[str, ...], speed: Operators
    ) -> None:
        self._speed = speed
        trains = [any(param.trainable for param in segment.parameters) for segment in found]
        is_first = _first(found, trains)
        block_of = [next((b for b in blocks if is_inside(segment.path, (b,))), None) for segment in found]
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        for place, block in enumerate(block_of):
            if block is not None:
                first.setdefault(block, place)
                last[block] = place
        self.all = tuple(
            Work(
                segment=segment,
                operators=tuple(captured.operators[i] for i in segment.operators),
                is_first=is_first[place],
                trains=trains[place],
                taken=_bytes(source.value for source in segment.inputs),
                given=_bytes(segment.outputs),
                in_block=block is not None,
                opens_block=block is not None and first[block] == place,
                kept_inside=sum(one.kept_bytes for one, b in zip(found, block_of, strict=True) if b == block)
                if block is not None and last[block] == place
                else 0.0,
            )
            for place, (segment, block) in enumerate(zip(found, block_of, strict=True))
        )
        alike = {(work.segment.like, work.is_first, work.trains): work for work in reversed(self.all)}
        counts = Counter((work.segment.like, work.is_first, work.trains) for work in self.all)
        self._distinct = [(work, counts[key]) for key, work in alike.items()]
        names = units(ModelShape(captured.parameters))
        together: dict[int | None, list[ParamShape]] = {}
        placed = {param: unit_of(param.name, names) for param in captured.parameters}
        for param, unit in placed.items():
            together.setdefault(unit, []).append(param)
        self.unit_of = {param.name: together[unit] for param, unit in placed.items()}
        """By parameter, all that are in its unit."""

        self._times: dict[tuple[int, bool, bool, Share], Times] = {}
        self._again: dict[tuple[int, Recompute, Share], float] = {}

    def times(self, work: Work, share: Share) -> Times:
        """Return the seconds of both passes of a part of a segment."""
        key = work.segment.like, work.is_first, work.trains, share
        if key not in self._times:
            self._times[key] = times_of(work.operators, self._speed, share, is_first=work.is_first, trains=work.trains)
        return self._times[key]

    def whole_s(self, rows: float) -> float:
        """Return the seconds of both passes through all segments, of a part of the rows."""
        passes = ((count, self.times(work, Share(rows=rows))) for work, count in self._distinct)
        return sum(count * (found.forward + found.backward) for count, found in passes)

    def again_s(self, work: Work, share: Share, recompute: Recompute) -> float:
        """Return the seconds of what is computed again of it; `selective` keeps the results of products."""
        key = work.segment.like, recompute, share
        if key not in self._again:
            again = (op for op in work.operators if recompute == "full" or not op.flops)
            self._again[key] = times_of(again, self._speed, share, is_first=True).forward
        return self._again[key]

    def alike(self, work: Work) -> tuple[object, ...]:
        """Return what prices know of a segment, but for what was met before it: those with the same cost the same."""
        units = (self.unit_of[param.name] for param in work.segment.parameters)
        # What sharding adds is a part of what a whole unit takes.
        sizes = tuple((len(unit), sum(param.bytes for param in unit)) for unit in units)
        return work.segment.like, work.is_first, work.trains, work.opens_block, work.kept_inside, sizes

    def least_s(self, arrangement: Arrangement) -> float:
        """Return seconds that one micro-batch takes through all stages and back, in whatever ways.

        Less what gradients of weights save of a step with zero bubble (`auto/solver/pipeline_problem`), spread over its
        passes.
        """
        parts = arrangement.model if arrangement.model > 1 else arrangement.data if arrangement.cuts_by_rows else 1
        rows = 1.0 if arrangement.cuts_by_rows else 1 / arrangement.row_parts
        whole = Share(rows=1 / arrangement.row_parts)
        shares = {whole, Share(rows=rows, outer=1 / parts), Share(rows=rows, inner=1 / parts)}
        # A bound has no time to ask of which modules ranks can compute parts. A part may take longer than the whole:
        # products of few rows are cut along their inner dimension too.
        split = Share(rows=1 / arrangement.row_parts / arrangement.model)
        least = np.zeros(3)
        for work, count in self._distinct:
            may_be_parts = set() if work.segment.is_glue else {split}
            tried = {split, *shares} if _may_be_cut(work.segment) else {whole, *may_be_parts}
            least += count * np.min([self._passes_s(work, share, arrangement) for share in tried], axis=0)
        return float(least.max())

    def _passes_s(self, work: Work, share: Share, at: Arrangement) -> tuple[float, ...]:
        """Return seconds of which all segments together take the largest sum."""
        found = self.times(work, share)
        again = self.again_s(work, share, at.recompute) if work.in_block and at.recompute != "none" else 0.0
        seconds = found.forward + found.backward + again
        if not at.zero_bubble:
            return seconds, seconds, seconds
        # Of (micro-batches + stages - 1) / stages passes. Other seconds that an option has add more than they save.
        saved = (at.stages - 1) / (at.micro_batches + at.stages - 1)
        return tuple(seconds - saved * fills for fills in fills_s(found.forward, found.backward, found.weights))


def _first(found: tuple[Segment, ...], trains: list[bool]) -> list[bool]:
    """Return for every segment whether nothing before it trains."""
    first: list[bool] = []
    for segment in found:
        before = [source.source for source in segment.inputs if isinstance(source.source, int)]
        first.append(all(first[place] and not trains[place] for place in before))
    return first


def _may_be_cut(segment: Segment) -> bool:
    return segment.kind in ("Linear", "Embedding") or segment.last_dim_parts > 1 or segment.token_parts > 1


def _bytes(tensors: Iterable[TensorShape]) -> float:
    return float(sum(one.bytes for one in tensors))
