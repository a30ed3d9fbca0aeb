"""`StateShard`, `plan_moves`: which rank keeps which part of an optimizer's state, and what moves when ranks change.

Pure. The parameters of an optimizer lie one after another in blocks of 64 elements, and a shard is an equal run of
blocks. With a mirror each rank keeps the shard of the next rank too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

BLOCK = 64
"""Elements that stay together: as many as a loop of torch takes at once, so that its remainder is the same one."""


@dataclass(frozen=True, slots=True, order=True)
class StateShard:
    """One of several equal parts."""

    index: int
    count: int

    def blocks(self, total: int) -> range:
        """Return which of all blocks it has."""
        return range(self.index * total // self.count, (self.index + 1) * total // self.count)


WHOLE = StateShard(0, 1)
"""All of it."""


def shards_of(rank: int, ranks: int, mirror: int) -> tuple[StateShard, ...]:
    """Return the shards that a rank keeps, its own first.

    Args:
        rank: Which rank.
        ranks: Of how many.
        mirror: How many of the next ranks' shards it keeps too.
    """
    return tuple(StateShard((rank + step) % ranks, ranks) for step in range(min(mirror + 1, ranks)))


def runs_of(shards: Iterable[StateShard], total: int) -> list[range]:
    """Return the blocks that some shards have, as runs that do not touch, in order."""
    runs: list[range] = []
    for run in sorted((shard.blocks(total) for shard in shards), key=lambda run: run.start):
        if not run:
            continue
        if runs and run.start <= runs[-1].stop:
            runs[-1] = range(runs[-1].start, max(runs[-1].stop, run.stop))
        else:
            runs.append(run)
    return runs


@dataclass(frozen=True, slots=True)
class ShardMove:
    """A run of blocks that one rank sends to another."""

    source: int
    target: int
    blocks: range


@dataclass(frozen=True, slots=True)
class MovePlan:
    """What ranks send each other so that each has what it needs."""

    moves: tuple[ShardMove, ...]
    missing: tuple[range, ...]
    """Blocks that a rank needs and no rank has."""


def plan_moves(current: Sequence[Sequence[StateShard]], needed: Sequence[Sequence[StateShard]], total: int) -> MovePlan:
    """Return what moves so that each rank has the shards that it needs, no block twice to one rank.

    Of several ranks that have a block, the one that has sent least so far sends it.

    Args:
        current: The shards of each rank now; they may be of different cuts.
        needed: Those that it is to have.
        total: All blocks.
    """
    has, wants = ([runs_of(shards, total) for shards in each] for each in (current, needed))
    ends = sorted({end for runs in (*has, *wants) for run in runs for end in (run.start, run.stop)})
    sent, moves, missing = [0] * len(current), list[ShardMove](), list[range]()
    for start, stop in pairwise(ends):
        holders = [rank for rank, runs in enumerate(has) if _covers(runs, start)]
        targets = [rank for rank, runs in enumerate(wants) if _covers(runs, start) and rank not in holders]
        if targets and not holders:
            missing.append(range(start, stop))
            continue
        for target in targets:
            source = min(holders, key=lambda rank: (sent[rank], rank))
            sent[source] += stop - start
            moves.append(ShardMove(source, target, range(start, stop)))
    return MovePlan(tuple(moves), tuple(missing))


def _covers(runs: Sequence[range], block: int) -> bool:
    return any(block in run for run in runs)


class BlockTable:
    """Where the elements of parameters lie in the blocks.

    Args:
        sizes: Elements of each parameter.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = tuple(sizes)
        self._starts = list(accumulate((-(-size // BLOCK) for size in sizes), initial=0))
        self.total = self._starts[-1]
        """All blocks."""

    def slices(self, blocks: range) -> Iterator[tuple[int, int, int]]:
        """Yield the parameters in a run of blocks: the index of each, and the first and last (excluded) element."""
        index = max(0, bisect_right(self._starts, blocks.start) - 1)
        while blocks and index < len(self._sizes) and self._starts[index] < blocks.stop:
            first = self._starts[index]
            start = max(0, blocks.start - first) * BLOCK
            stop = min(self._sizes[index], (blocks.stop - first) * BLOCK)
            if start < stop:
                yield index, start, stop
            index += 1
