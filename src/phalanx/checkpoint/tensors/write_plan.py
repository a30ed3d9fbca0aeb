"""`plan_writes`: assign to each rank the tensor chunks that it writes, deduplicating replicas (pure).

Every rank describes its chunks, and rank 0 assigns the writes: a chunk that several ranks hold is written once, and a
large one is split over the ranks that hold it. Nothing here knows about meshes or placements: two ranks hold the same
chunk if they report the same offset and size.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from phalanx.checkpoint.tensors.chunk import TensorChunk, covers
from phalanx.errors import ConfigError

PIECE_BYTES = 1 << 20
"""Chunks smaller than this are not split over the ranks that hold them."""


@dataclass(frozen=True, slots=True)
class ChunkDescription:
    """The chunk that one rank holds of one tensor, as it reports it."""

    dtype: str
    item_bytes: int
    chunk: TensorChunk
    """Its offset and size in `shape`."""

    shape: tuple[int, ...]
    """Shape of what `chunk` is a chunk of: the full tensor, or a slice of it."""

    slices: tuple[tuple[int, int, int], ...] = ()
    """For a slice: (dim, index of the slice, number of slices), by dim. Slices concatenate to the full tensor."""

    split: bool = True
    """Whether several ranks may share the writing. Ranks' buffers may differ, and a reader must get one of them."""

    def to_json(self) -> list[Any]:
        """Return the fields as a JSON list."""
        return [self.dtype, self.item_bytes, self.chunk.offset, self.chunk.size, self.shape, self.slices, self.split]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> ChunkDescription:
        """Return the description that `to_json` wrote."""
        dtype, item_bytes, offset, size, shape, slices, split = value
        chunk = TensorChunk(tuple(offset), tuple(size))
        return cls(dtype, item_bytes, chunk, tuple(shape), tuple((int(d), int(i), int(n)) for d, i, n in slices), split)


@dataclass(frozen=True, slots=True)
class WriteItem:
    """A chunk of a tensor that one rank writes."""

    chunk: TensorChunk
    rank: int


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One full tensor of a checkpoint and the chunks it is written in."""

    dtype: str
    shape: tuple[int, ...]
    write_items: tuple[WriteItem, ...]
    starts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """For a tensor of concatenated slices: first index of every slice, by dim."""

    def chunk_of(self, part: ChunkDescription) -> TensorChunk:
        """Return which chunk of the full tensor a rank holds."""
        offset = list(part.chunk.offset)
        for dim, index, _ in part.slices:
            offset[dim] += self.starts[dim][index]
        return TensorChunk(tuple(offset), part.chunk.size)

    def to_json(self) -> list[Any]:
        """Return the fields as a JSON list."""
        write_items = [[p.rank, p.chunk.offset, p.chunk.size] for p in self.write_items]
        return [self.dtype, self.shape, write_items, {str(dim): starts for dim, starts in self.starts.items()}]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> TensorLayout:
        """Return the layout that `to_json` wrote."""
        dtype, shape, write_items, starts = value
        return cls(
            dtype,
            tuple(shape),
            tuple(WriteItem(TensorChunk(tuple(offset), tuple(size)), rank) for rank, offset, size in write_items),
            {int(dim): tuple(firsts) for dim, firsts in starts.items()},
        )


def plan_writes(descriptions: Sequence[Mapping[str, ChunkDescription]]) -> dict[str, TensorLayout]:
    """Return every tensor that any rank holds, and which rank writes which chunk of it.

    Args:
        descriptions: The chunks of every rank, by name of the tensor, in rank order.

    Raises:
        ConfigError: If ranks disagree about a tensor, or no rank holds some chunk of it; names it.
    """
    by_name: dict[str, dict[int, ChunkDescription]] = {}
    for rank, parts in enumerate(descriptions):
        for name, part in parts.items():
            by_name.setdefault(name, {})[rank] = part
    return {name: _entry(name, parts) for name, parts in by_name.items()}


def _entry(name: str, parts: Mapping[int, ChunkDescription]) -> TensorLayout:
    _check_equal(name, "dtype", {rank: part.dtype for rank, part in parts.items()})
    starts, shape = _line_up(name, parts)
    unwritten = TensorLayout(next(iter(parts.values())).dtype, shape, (), starts)
    holders: dict[TensorChunk, list[int]] = {}
    for rank, part in parts.items():
        holders.setdefault(unwritten.chunk_of(part), []).append(rank)
    if not covers(holders, shape):
        raise ConfigError(
            f"the ranks hold {sum(chunk.count for chunk in holders)} of the {math.prod(shape)} elements of {name!r}, "
            f"shape {list(shape)}. Every chunk must be held by some rank that calls save."
        )
    write_items = [p for chunk, ranks in holders.items() for p in _write_items(name, chunk, ranks, parts[ranks[0]])]
    return TensorLayout(unwritten.dtype, shape, tuple(write_items), starts)


def _write_items(name: str, chunk: TensorChunk, ranks: Sequence[int], part: ChunkDescription) -> list[WriteItem]:
    if not chunk.count:
        return []
    if not part.split:
        return [WriteItem(chunk, min(ranks))]
    parts = max(1, min(len(ranks), chunk.count * part.item_bytes // PIECE_BYTES))
    # Small tensors are assigned to ranks by a hash of their names, which balances the writes.
    first = zlib.crc32(name.encode())
    return [WriteItem(chunk, ranks[(first + i) % len(ranks)]) for i, chunk in enumerate(chunk.split(parts))]


def _line_up(name: str, parts: Mapping[int, ChunkDescription]) -> tuple[dict[int, tuple[int, ...]], tuple[int, ...]]:
    """Return where every slice starts along the sharded dims, and the shape of the full tensor."""
    _check_equal(name, "cut", {rank: [(dim, n) for dim, _, n in part.slices] for rank, part in parts.items()})
    some = next(iter(parts.values()))
    starts, shape = {}, list(some.shape)
    for position, (dim, _, count) in enumerate(some.slices):
        sizes = {part.slices[position][1]: part.shape[dim] for part in parts.values()}
        if len(sizes) < count:
            raise ConfigError(f"{count - len(sizes)} of {count} slices of {name!r} are held by no rank.")
        *before, shape[dim] = accumulate((sizes[index] for index in range(count)), initial=0)
        starts[dim] = tuple(before)
    uncut = {rank: [n for d, n in enumerate(part.shape) if d not in starts] for rank, part in parts.items()}
    _check_equal(name, "shape", uncut)
    return starts, tuple(shape)


def _check_equal(name: str, what: str, by_rank: Mapping[int, Any]) -> None:
    values = list(by_rank.values())
    if any(value != values[0] for value in values):
        other = next(rank for rank, value in by_rank.items() if value != values[0])
        first = next(iter(by_rank))
        raise ConfigError(
            f"{what} of {name!r} is {by_rank[first]} on rank {first} and {by_rank[other]} on rank {other}. Let every "
            "rank hold the same model and optimizer, or mark a sharded parameter with param.is_distributed = True."
        )
