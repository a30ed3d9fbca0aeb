"""`TensorChunk`: a rectangular part of a tensor, as offsets and sizes per dim (pure)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from phalanx.data.sampling.shards import even_split


@dataclass(frozen=True, slots=True, order=True)
class TensorChunk:
    """A rectangular chunk of a tensor; of a tensor without dims it is all."""

    offset: tuple[int, ...]
    """First index along every dim."""

    size: tuple[int, ...]
    """Extent along every dim."""

    @classmethod
    def full(cls, shape: Sequence[int]) -> TensorChunk:
        """Return the chunk that is the full tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.size)

    def overlap(self, other: TensorChunk) -> TensorChunk | None:
        """Return the intersection of two chunks of one tensor, or None."""
        starts = tuple(map(max, self.offset, other.offset))
        ends = (min(a + n, b + m) for a, n, b, m in zip(self.offset, self.size, other.offset, other.size, strict=True))
        size = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return TensorChunk(starts, size) if all(n > 0 for n in size) else None

    def within(self, outer: TensorChunk) -> tuple[slice, ...]:
        """Return the index of this chunk in a tensor that holds `outer`."""
        starts = (mine - its for mine, its in zip(self.offset, outer.offset, strict=True))
        return tuple(slice(start, start + n) for start, n in zip(starts, self.size, strict=True))

    def split(self, parts: int) -> list[TensorChunk]:
        """Split into at most `parts` chunks along the first dim, or along the longest if the first is too short."""
        if not self.size or parts <= 1:
            return [self]
        dim = 0 if self.size[0] >= parts else max(range(len(self.size)), key=lambda d: self.size[d])
        cuts = [even_split(self.size[dim], parts, i) for i in range(min(parts, self.size[dim]))]
        return [TensorChunk(_with(self.offset, dim, self.offset[dim] + at), _with(self.size, dim, n)) for at, n in cuts]


def covers(chunks: Iterable[TensorChunk], shape: Sequence[int]) -> bool:
    """Return whether chunks that are equal or disjoint make up a full tensor."""
    return sum(chunk.count for chunk in set(chunks)) >= math.prod(shape)


def _with(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])
