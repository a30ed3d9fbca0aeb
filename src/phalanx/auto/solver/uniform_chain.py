"""`find_equal_pieces`: find stage boundaries of a chain of equal layers, such as transformer blocks (pure).

What a rank takes and holds depends on how many of the equal pieces it has, and not on which; with several stages a
rank, that is what the formula says, and what it holds at least. So a cut is where the others are cut, which is possible
in a few ways only, and a number of equal pieces for each rank: at least one for each stage that lies among them. Time
and memory of a rank only grow with its number. The least time of the rank that works the most is therefore reached by
giving piece after piece to the rank that works the least with it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.auto.solver.problem import ROUNDING, StepProblem

_MOST_OTHERS = 10
"""Pieces outside the equal ones up to which all ways to cut these are listed."""

Stages = tuple[int, ...]
"""The stage of every piece."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class ChainCosts(NamedTuple):
    """What the pieces of a chain cost under one pick."""

    sums: Floats
    """By kind and piece: seconds of passes, of gradient synchronisation and update; persistent, activation and deferred
    bytes; seconds of forward passes alone."""

    largest_bytes: Floats
    """What the largest node of a piece needs while it runs, and while the optimizer does; by kind and piece."""


class _OuterPartition(NamedTuple):
    """One partition of the pieces that are not among the equal ones."""

    stages: tuple[int, ...]
    """Stage of every piece that is not."""

    first: int
    """The first stage that has some of the equal pieces."""

    last: int


def find_equal_pieces(costs: Sequence[ChainCosts], borders: Sequence[tuple[float, ...]]) -> range:
    """Return the longest run of pieces that cost the same in every option, as do the borders between them."""
    every = np.concatenate([values for cost in costs for values in cost])
    same = (every[:, 1:] == every[:, :-1]).all(axis=0)
    longest, start = range(1), 0
    for (is_same, _), alike in itertools.groupby(zip(same.tolist(), borders, strict=True)):
        count = len(list(alike))
        if is_same and count >= len(longest):
            longest = range(start, start + count + 1)
        start += count
    return longest


class UniformChain:
    """The cuts of a chain, by how many of its equal pieces each rank has."""

    def __init__(self, problem: StepProblem, equal: range, in_flight: Floats) -> None:
        """Keep what is the same for all picks.

        Args:
            problem: The step.
            equal: Its equal pieces.
            in_flight: Of how many micro-batches each stage keeps activations. Bounds hold if that is never too many.
        """
        self._problem, self._equal = problem, equal
        count = problem.piece_count
        self._others = [piece for piece in range(count) if piece not in equal]
        self._partitions = list(self._list_outer())
        ranks, partitions = problem.ranks, len(self._partitions)
        self._outside: NDArray[np.bool_] = np.zeros((partitions, ranks, len(self._others)), dtype=bool)
        self._least: Ints = np.zeros((partitions, ranks), dtype=np.int64)
        self._sent: Floats = np.zeros((partitions, ranks))
        self._arriving: Floats = np.zeros((partitions, ranks))
        """Bytes at borders."""

        self._outer: Ints = np.zeros((partitions, len(self._others)), dtype=np.int64)
        self._inside: NDArray[np.bool_] = np.zeros((partitions, problem.stages), dtype=bool)
        for number, partition in enumerate(self._partitions):
            self._outer[number] = partition.stages
            for index, stage in enumerate(partition.stages):
                self._outside[number, stage % ranks, index] = True
            self._inside[number, partition.first : partition.last + 1] = True
            for stage in range(partition.first, partition.last + 1):
                self._least[number, stage % ranks] += 1
            for stage, piece in enumerate(self._borders(partition)):
                for rank in (stage % ranks, (stage + 1) % ranks):
                    self._sent[number, rank] += problem.sends[piece]
                    self._arriving[number, rank] += problem.border_bytes[piece]
        self._in_flight = in_flight
        self._in_debt = np.array([problem.in_debt(stage) for stage in range(problem.stages)], dtype=np.float64)

    @staticmethod
    def is_for(problem: StepProblem, equal: range) -> bool:
        """Return whether so many pieces are equal that few ways are left to cut the others."""
        return len(equal) > 1 and problem.piece_count - len(equal) <= _MOST_OTHERS

    def best_of(
        self,
        costs: ChainCosts,
        saved: float,
        below: float,
        price: Callable[[list[Stages], float], tuple[float, Stages]],
        at_once: int,
    ) -> tuple[float, Stages]:
        """Return seconds that no cut of a pick is below, and the stage of every piece in the fastest.

        That is the fastest of all with one stage a rank. With several it is the fastest of what `price` was asked for:
        cuts that are the fastest by the formula with a partition of the pieces outside. If none fits and takes less
        than `below` by the formula, that is returned and no stages.

        Args:
            costs: What the pieces cost under the pick.
            saved: Seconds of idle time that it fills at most.
            below: Seconds of a step, without those of links.
            price: Returns the seconds of the fastest of several cuts, without those of links, and the cut; none need be
                found that is not below a mark.
            at_once: Cuts to ask for together.
        """
        work, after, most = self._tables(costs)
        even, after_s = _min_max(work, self._least, most), _min_max(after, self._least, most)
        fixed_s = (costs.sums[0].sum() + self._sent.sum(axis=1)) / self._problem.virtual - saved
        passes = self._passes_s(np.where(even < math.inf, even, 0.0), fixed_s)
        bounds = np.where(even < math.inf, passes + after_s, math.inf)
        best: tuple[float, Stages] = math.inf, ()
        bound, cuts = below, list[Stages]()
        for partition in np.argsort(bounds, kind="stable"):
            if len(cuts) >= at_once:
                best, cuts = min(best, price(cuts, best[0])), []
            below = min(below, best[0])
            if bounds[partition] >= below:
                break
            rest = float(fixed_s[partition]), float(after_s[partition])
            fastest = list(
                self._fastest_numbers(
                    work[partition], after[partition], self._least[partition], most[partition], *rest, below
                )
            )
            if fastest:
                formula_s, numbers = fastest[-1]
                bound = min(bound, formula_s)
                cuts += self._list_cuts(int(partition), numbers)
        if cuts:
            best = min(best, price(cuts, best[0]))
        return bound, best[1]

    def _fastest_numbers(
        self, work: Floats, after: Floats, least: Ints, most: Ints, fixed_s: float, after_s: float, below: float
    ) -> Iterator[tuple[float, Ints]]:
        """Yield ever faster numbers of pieces by rank: less and less comes after the work, which takes longer."""
        while True:
            longest = float(_min_max(work, least, most))
            passes = float(self._passes_s(longest, fixed_s)) if longest < math.inf else math.inf
            if passes + after_s >= below or passes == math.inf:
                return
            within = np.minimum(most, _count_fitting(work, longest))
            latest = float(_min_max(after, least, within))
            seconds = passes + latest
            if seconds < below:
                below = seconds
                yield seconds, _deal_pieces(work, least, np.minimum(within, _count_fitting(after, latest)))
            most = np.minimum(most, _count_fitting(after, float(np.nextafter(latest, -math.inf))))

    def _passes_s(self, longest: Floats | float, fixed_s: Floats | float) -> Floats:
        """Return the seconds of all passes, by those of the rank that works the most: no less than it works."""
        micro = self._problem.micro_batches
        return np.maximum(fixed_s + (micro - 1 / self._problem.virtual) * longest, micro * longest)

    def _tables(self, costs: ChainCosts) -> tuple[Floats, Floats, Ints]:
        """Return the work of ranks with 0, 1, ... equal pieces, and how many fit, by partition and rank."""
        equal, others = self._equal, self._others
        piece_cost, outside = (
            costs.sums[:, equal.start],
            costs.sums[:, others] @ self._outside.swapaxes(1, 2).astype(np.float64),
        )
        outside = outside.swapaxes(0, 1)  # by kind, partition and rank
        numbers = np.arange(len(equal) + 1)
        work = (outside[0] + self._sent)[..., None] + piece_cost[0] * numbers
        after = outside[1][..., None] + piece_cost[1] * numbers
        most = np.where(self._least > 0, len(equal), 0)
        if self._problem.room < math.inf:
            room = self._problem.room * (1 + 0.9 * ROUNDING)  # a margin for sums in another order
            for (passing, each), largest in zip(
                (self._passing_bytes(costs), (0.0, 0.0)), costs.largest_bytes, strict=True
            ):
                needs = np.max(np.where(self._outside, largest[others], 0.0), axis=2, initial=0.0)
                needs = np.maximum(needs, np.where(self._least > 0, largest[equal.start], 0.0))
                fixed, by_piece = passing + outside[2] + self._arriving + needs, each + piece_cost[2]
                most = np.minimum(
                    most, _count_fitting(fixed[..., None] + np.asarray(by_piece)[..., None] * numbers, room)
                )
        return work, after, most

    def _passing_bytes(self, costs: ChainCosts) -> tuple[Floats, Floats]:
        """Return what ranks keep and owe of pieces outside, and of each equal one, by partition and rank.

        Every stage among the equal pieces has one of them. Any more are where they keep the least: what the others keep
        above that is with what is fixed.
        """
        inside, others, ranks = self._equal.start, self._others, self._problem.ranks
        activation, deferred = costs.sums[3], costs.sums[4]
        by_stage = self._in_flight * activation[inside] + self._in_debt * deferred[inside]
        least = np.where(self._inside, by_stage, math.inf).reshape(-1, self._problem.virtual, ranks).min(axis=1)
        each = np.where(least < math.inf, least, 0.0)
        first = self._problem.by_rank(np.where(self._inside, by_stage, 0.0))
        outer = self._in_flight[self._outer] * activation[others] + self._in_debt[self._outer] * deferred[others]
        fixed = first - self._least * each + (self._outside * outer[:, None]).sum(axis=2)
        return fixed, each

    def _list_outer(self) -> Iterator[_OuterPartition]:
        stages, equal = self._problem.stages, self._equal
        before, behind = equal.start, len(self._others) - equal.start
        for borders in itertools.product((0, 1), repeat=len(self._others)):
            first, last = sum(borders[:before]), stages - 1 - sum(borders[before:])
            if 0 <= last - first < len(equal):
                head = [sum(borders[:index]) for index in range(before)]
                tail = [last + sum(borders[before : before + index + 1]) for index in range(behind)]
                yield _OuterPartition((*head, *tail), first, last)

    def _borders(self, partition: _OuterPartition) -> Iterator[int]:
        """Yield the piece after which the border of each stage but the last costs as much."""
        before = self._equal.start
        ends = {stage: piece for stage, piece in zip(partition.stages, self._others, strict=True) if piece < before}
        ends |= {partition.last: self._equal[-1]}
        ends |= {stage: piece for stage, piece in zip(partition.stages, self._others, strict=True) if piece > before}
        for stage in range(self._problem.stages - 1):
            # Borders among the equal pieces cost the same, wherever they are.
            among = partition.first <= stage < partition.last
            yield self._equal.start if among else ends[stage]

    def _list_cuts(self, number: int, numbers: Ints) -> list[Stages]:
        """Return cuts by the stage of every piece; a rank's stages get as many pieces each, those outside among them.

        Where these do not divide, neighbours get more: those that work longer at the same time make others wait the
        least. Any may be the first of them, which matters only with several stages a rank.
        """
        stages, ranks, before = self._problem.stages, self._problem.ranks, self._equal.start
        partition = self._partitions[number]
        has, cuts = Counter(partition.stages), dict[Stages, None]()
        for first in range(stages if self._problem.virtual > 1 else 1):
            share = dict.fromkeys(range(partition.first, partition.last + 1), 1)
            for rank in range(ranks):
                mine = sorted((s for s in share if s % ranks == rank), key=lambda stage: (stage - first) % stages)
                for _ in range(int(numbers[rank]) - len(mine)):
                    share[min(mine, key=lambda stage: has[stage] + share[stage])] += 1
            inside = [stage for stage, count in share.items() for _ in range(count)]
            cuts[(*partition.stages[:before], *inside, *partition.stages[before:])] = None
        return list(cuts)


def _min_max(table: Floats, least: Ints, most: Ints) -> Floats:
    """Return the smallest value of the largest rank when all pieces are given away; infinity if they cannot be.

    Args:
        table: By partition (if any), rank and number of pieces, rising.
        least: Pieces of each rank at least.
        most: Pieces of each rank at most.
    """
    numbers = np.arange(table.shape[-1])
    free = (numbers > least[..., None]) & (numbers <= most[..., None])
    sorted_values = np.sort(np.where(free, table, math.inf).reshape(*table.shape[:-2], -1), axis=-1)
    left = table.shape[-1] - 1 - least.sum(axis=-1)
    last = np.take_along_axis(sorted_values, np.maximum(left - 1, 0)[..., None], axis=-1)[..., 0]
    begin = np.take_along_axis(table, least[..., None], axis=-1)[..., 0].max(axis=-1)
    largest = np.maximum(begin, np.where(left > 0, last, 0.0))
    return np.asarray(np.where((most >= least).all(axis=-1), largest, math.inf))


def _count_fitting(table: Floats, limit: float) -> Ints:
    """Return how many pieces keep to a limit, by rank; -1 if not even none does."""
    return np.asarray((table <= limit).sum(axis=-1) - 1)


def _deal_pieces(work: Floats, least: Ints, most: Ints) -> Ints:
    """Return numbers of pieces for each rank: piece after piece goes to the rank that works the least with it."""
    numbers = least.copy()
    for _ in range(work.shape[-1] - 1 - int(least.sum())):
        more = [work[rank, number + 1] if number < most[rank] else math.inf for rank, number in enumerate(numbers)]
        numbers[int(np.argmin(more))] += 1
    return numbers
