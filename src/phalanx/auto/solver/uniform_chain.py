"""The best cut of a chain in which many equal pieces follow each other, as the blocks of a transformer do (pure).

What a rank takes and holds depends on how many of the equal pieces it has, and not on which. So a cut is where the
others are cut, which can be in a few ways only, and a number of equal pieces for each rank: at least one for each stage
that lies among them. Time and memory of a rank only grow with its number. The least time of the rank that works the
most is therefore reached by giving piece after piece to the rank that works the least with it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.auto.solver.pipeline_problem import StagedChoices
from phalanx.auto.solver.problem import ROUNDING

_MOST_OTHERS = 10
"""Pieces outside the equal ones up to which all ways to cut these are listed."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Costs(NamedTuple):
    """What the pieces of a chain cost under one pick."""

    sums: Floats
    """By kind and piece: work, what comes after it, held, kept, owed."""

    working: Floats
    """By piece."""


class _Outside(NamedTuple):
    """One way to cut what is not among the equal pieces."""

    stages: tuple[int, ...]
    """Stage of every piece that is not."""

    first: int
    """The first stage that has some of the equal pieces."""

    last: int


def equal_pieces(costs: Sequence[Costs], sends: Sequence[float]) -> range:
    """Return the longest run of pieces that cost the same in every option, as do the borders between them."""
    every = np.concatenate([np.concatenate([one.sums, one.working[None]]) for one in costs])
    same = (every[:, 1:] == every[:, :-1]).all(axis=0)
    longest, start = range(1), 0
    for (is_same, _), borders in itertools.groupby(zip(same.tolist(), sends, strict=True)):
        count = len(list(borders))
        if is_same and count >= len(longest):
            longest = range(start, start + count + 1)
        start += count
    return longest


class Repeated:
    """The cuts of a chain, by how many of its equal pieces each rank has."""

    def __init__(self, choices: StagedChoices, equal: range) -> None:
        self._choices, self._equal = choices, equal
        count = choices.pieces[-1] + 1
        self._others = [piece for piece in range(count) if piece not in equal]
        self._ways = list(self._cuts_outside())
        ranks, ways = choices.ranks, len(self._ways)
        self._has: NDArray[np.bool_] = np.zeros((ways, ranks, len(self._others)), dtype=bool)
        self._least: Ints = np.zeros((ways, ranks), dtype=np.int64)
        self._sent: Floats = np.zeros((ways, ranks))
        for number, way in enumerate(self._ways):
            for place, stage in enumerate(way.stages):
                self._has[number, stage % ranks, place] = True
            for stage in range(way.first, way.last + 1):
                self._least[number, stage % ranks] += 1
            for stage, send in enumerate(self._borders(way)):
                self._sent[number, stage % ranks] += send
                self._sent[number, (stage + 1) % ranks] += send
        self._flying = np.array([choices.in_flight(rank) for rank in range(ranks)], dtype=np.float64)
        self._owing = np.array([choices.in_debt(rank) for rank in range(ranks)], dtype=np.float64)

    @staticmethod
    def is_for(choices: StagedChoices, equal: range) -> bool:
        """Return whether so many pieces are equal that few ways are left to cut the others."""
        return len(equal) > 1 and choices.pieces[-1] + 1 - len(equal) <= _MOST_OTHERS

    def best_of(self, costs: Costs, saved: float, below: float) -> tuple[int, ...]:
        """Return the stage of every piece in the fastest cut of a pick; none if none fits and is faster than `below`.

        Args:
            costs: What the pieces cost under the pick.
            saved: Seconds of idle time that it fills at most.
            below: Seconds of a step, without those of links.
        """
        work, after, most = self._tables(costs)
        even, late = _least_most(work, self._least, most), _least_most(after, self._least, most)
        always = (costs.sums[0].sum() + self._sent.sum(axis=1)) / self._choices.virtual - saved
        passes = self._passes_s(np.where(even < math.inf, even, 0.0), always)
        bounds = np.where(even < math.inf, passes + late, math.inf)
        best, found = below, None
        for way in np.argsort(bounds, kind="stable"):
            if bounds[way] >= best:
                break
            rest = float(always[way]), float(late[way])
            for seconds, numbers in self._of_way(work[way], after[way], self._least[way], most[way], *rest, best):
                best, found = seconds, (way, numbers)
        return () if found is None else self._stages(*found)

    def _of_way(
        self, work: Floats, after: Floats, least: Ints, most: Ints, always: float, late: float, below: float
    ) -> Iterator[tuple[float, Ints]]:
        """Yield ever faster numbers of pieces by rank: less and less comes after the work, which takes longer."""
        while True:
            longest = float(_least_most(work, least, most))
            passes = float(self._passes_s(longest, always)) if longest < math.inf else math.inf
            if passes + late >= below or passes == math.inf:
                return
            within = np.minimum(most, _fitting(work, longest))
            latest = float(_least_most(after, least, within))
            seconds = passes + latest
            if seconds < below:
                below = seconds
                yield seconds, _shared(work, least, np.minimum(within, _fitting(after, latest)))
            most = np.minimum(most, _fitting(after, float(np.nextafter(latest, -math.inf))))

    def _passes_s(self, longest: Floats | float, always: Floats | float) -> Floats:
        """Return the seconds of all passes, by those of the rank that works the most: no less than it works."""
        micro = self._choices.micro_batches
        return np.maximum(always + (micro - 1 / self._choices.virtual) * longest, micro * longest)

    def _tables(self, costs: Costs) -> tuple[Floats, Floats, Ints]:
        """Return what ranks do with 0, 1, ... of the equal pieces, and how many they have room for, by way and rank."""
        equal, others = self._equal, self._others
        one, outside = costs.sums[:, equal.start], costs.sums[:, others] @ self._has.swapaxes(1, 2).astype(np.float64)
        outside = outside.swapaxes(0, 1)  # by kind, way and rank
        numbers = np.arange(len(equal) + 1)
        work = (outside[0] + self._sent)[..., None] + one[0] * numbers
        after = outside[1][..., None] + one[1] * numbers
        most = np.where(self._least > 0, len(equal), 0)
        if self._choices.room < math.inf:
            working = np.max(np.where(self._has, costs.working[others], 0.0), axis=2, initial=0.0)
            working = np.maximum(working, np.where(self._least > 0, costs.working[equal.start], 0.0))
            held = outside[2] + self._flying * outside[3] + self._owing * outside[4] + working
            each = one[2] + self._flying * one[3] + self._owing * one[4]
            room = self._choices.room * (1 + 0.9 * ROUNDING)  # what is found here fits in any order
            most = np.minimum(most, _fitting(held[..., None] + each[:, None] * numbers, room))
        return work, after, most

    def _cuts_outside(self) -> Iterator[_Outside]:
        stages, equal = self._choices.stages, self._equal
        before, behind = equal.start, len(self._others) - equal.start
        for borders in itertools.product((0, 1), repeat=len(self._others)):
            first, last = sum(borders[:before]), stages - 1 - sum(borders[before:])
            if 0 <= last - first < len(equal):
                head = [sum(borders[:place]) for place in range(before)]
                tail = [last + sum(borders[before : before + place + 1]) for place in range(behind)]
                yield _Outside((*head, *tail), first, last)

    def _borders(self, way: _Outside) -> Iterator[float]:
        """Yield the seconds of the border after each stage but the last."""
        before = self._equal.start
        ends = {stage: piece for stage, piece in zip(way.stages, self._others, strict=True) if piece < before}
        ends |= {way.last: self._equal[-1]}
        ends |= {stage: piece for stage, piece in zip(way.stages, self._others, strict=True) if piece > before}
        for stage in range(self._choices.stages - 1):
            # Borders among the equal pieces cost the same, wherever they are.
            among = way.first <= stage < way.last
            yield self._choices.sends[self._equal.start if among else ends[stage]]

    def _stages(self, number: int, numbers: Ints) -> tuple[int, ...]:
        """Return the stage of every piece; a rank's stages get as many pieces each, those outside among them.

        The seconds of a step do not say so, but stages of one rank that differ make others wait.
        """
        way, ranks = self._ways[number], self._choices.ranks
        has, share = Counter(way.stages), dict.fromkeys(range(way.first, way.last + 1), 1)
        for rank in range(ranks):
            mine = [stage for stage in share if stage % ranks == rank]
            for _ in range(int(numbers[rank]) - len(mine)):
                share[min(mine, key=lambda stage: has[stage] + share[stage])] += 1
        inside = [stage for stage, count in share.items() for _ in range(count)]
        before = self._equal.start
        return (*way.stages[:before], *inside, *way.stages[before:])


def _least_most(table: Floats, least: Ints, most: Ints) -> Floats:
    """Return the smallest value of the largest rank when all pieces are given away; infinity if they cannot be.

    Args:
        table: By way (if any), rank and number of pieces, rising.
        least: Pieces of each rank at least.
        most: Pieces of each rank at most.
    """
    numbers = np.arange(table.shape[-1])
    free = (numbers > least[..., None]) & (numbers <= most[..., None])
    given = np.sort(np.where(free, table, math.inf).reshape(*table.shape[:-2], -1), axis=-1)
    left = table.shape[-1] - 1 - least.sum(axis=-1)
    last = np.take_along_axis(given, np.maximum(left - 1, 0)[..., None], axis=-1)[..., 0]
    begin = np.take_along_axis(table, least[..., None], axis=-1)[..., 0].max(axis=-1)
    found = np.maximum(begin, np.where(left > 0, last, 0.0))
    return np.asarray(np.where((most >= least).all(axis=-1), found, math.inf))


def _fitting(table: Floats, limit: float) -> Ints:
    """Return how many pieces keep to a limit, by rank; -1 if not even none does."""
    return np.asarray((table <= limit).sum(axis=-1) - 1)


def _shared(work: Floats, least: Ints, most: Ints) -> Ints:
    """Return numbers of pieces for each rank: piece after piece goes to the rank that works the least with it."""
    numbers = least.copy()
    for _ in range(work.shape[-1] - 1 - int(least.sum())):
        more = [work[rank, number + 1] if number < most[rank] else math.inf for rank, number in enumerate(numbers)]
        numbers[int(np.argmin(more))] += 1
    return numbers
