"""`SampleSplit`: how many samples of each global batch each rank reads, where faster ranks read more.

A change holds from one global batch on, the same on every rank: the first that no loader of any rank has cut yet.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.cluster.shares import split_rows

BatchPosition = tuple[int, int, int]
"""A global batch: how often the loader was sent back before it, its epoch, and the position of the epoch after it."""

START: BatchPosition = (-1, 0, 0)
"""Before every global batch."""


class SampleSplit:
    """The split of global batches over the ranks that read their own samples.

    Args:
        ranks: Their number.
        parts: What part each reads until the split is changed; equal ones when None.
    """

    def __init__(self, ranks: int, parts: Sequence[int] | None = None) -> None:
        self.ranks, self.first_parts = ranks, (1,) * ranks if parts is None else tuple(parts)
        self.furthest: BatchPosition = START
        """The furthest global batch that a loader of this rank has cut."""

        self._changes: list[tuple[BatchPosition, tuple[int, ...]]] = [(START, self.first_parts)]
        """After which global batch on, and what part of it each rank reads."""

    @property
    def parts(self) -> tuple[int, ...]:
        """What part each rank reads from the last change on."""
        return self._changes[-1][1]

    def change(self, parts: Sequence[int], after: BatchPosition) -> None:
        """Split global batches after `after` otherwise. Every rank calls it alike, between the same two updates.

        Args:
            parts: Samples of each rank, of a full global batch.
            after: The furthest global batch that any rank has cut.
        """
        self._changes.append((after, tuple(parts)))

    def latest_slice(self, rows: int, index: int) -> tuple[int, int]:
        """Return (offset, length) of the samples of rank `index` from the last change on."""
        sizes = split_rows(rows, self.parts)
        return sum(sizes[:index]), sizes[index]

    def slice_rows(self, rows: int, index: int, position: BatchPosition) -> tuple[int, int]:
        """Return (offset, length) of the samples of rank `index` in a global batch that is read now."""
        self.furthest = max(self.furthest, position)
        sizes = split_rows(rows, next(parts for after, parts in reversed(self._changes) if after < position))
        return sum(sizes[:index]), sizes[index]
