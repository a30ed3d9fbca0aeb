"""Which rank writes which part of which tensor (pure).

Every rank describes what it holds, and rank 0 deals out the writing from all descriptions: what several ranks hold is
written once, and a large tensor is split over those who hold it. Nothing here knows about meshes or placements: two
ranks hold the same part when they say the same offset and size.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from phalanx.checkpoint.tensors.chunk import Box, cover
from phalanx.errors import ConfigError

PIECE_BYTES = 1 << 20
"""Parts smaller than this are not split over the ranks that hold them."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank holds of one tensor, as it tells the others."""

    dtype: str
    item_bytes: int
    box: Box
    """What it holds."""

    shape: tuple[int, ...]
    """Shape of what `box` is a part of: the whole tensor, or a slice of it."""

    slices: tuple[tuple[int, int, int], ...] = ()
    """For a slice: (dim, which slice this is, how many there are), by dim. Slices are lined up to the whole."""

    split: bool = True
    """Whether several ranks may share the writing. Ranks' buffers may differ, and one of them is to be read again."""

    def to_json(self) -> list[Any]:
        """Return the fields as a JSON list."""
        return [self.dtype, self.item_bytes, self.box.offset, self.box.size, self.shape, self.slices, self.split]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> Part:
        """Return the part that `to_json` described."""
        dtype, item_bytes, offset, size, shape, slices, split = value
        box = Box(tuple(offset), tuple(size))
        return cls(dtype, item_bytes, box, tuple(shape), tuple((int(d), int(i), int(n)) for d, i, n in slices), split)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor that one rank writes."""

    box: Box
    rank: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One whole tensor of a checkpoint and the pieces it is written in."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    starts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """For a tensor that is lined up: first index of every slice, by dim."""

    def box_of(self, part: Part) -> Box:
        """Return which part of the whole tensor a rank holds."""
        offset = list(part.box.offset)
        for dim, index, _ in part.slices:
            offset[dim] += self.starts[dim][index]
        return Box(tuple(offset), part.box.size)

    def to_json(self) -> list[Any]:
        """Return the fields as a JSON list."""
        pieces = [[p.rank, p.box.offset, p.box.size] for p in self.pieces]
        return [self.dtype, self.shape, pieces, {str(dim): starts for dim, starts in self.starts.items()}]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> Entry:
        """Return the entry that `to_json` described."""
        dtype, shape, pieces, starts = value
        return cls(
            dtype,
            tuple(shape),
            tuple(Piece(Box(tuple(offset), tuple(size)), rank) for rank, offset, size in pieces),
            {int(dim): tuple(found) for dim, found in starts.items()},
        )


def deal_out(held: Sequence[Mapping[str, Part]]) -> dict[str, Entry]:
    """Return every tensor that any rank holds, and who writes which piece of it.

    Args:
        held: What every rank holds, by name of the tensor, in rank order.

    Raises:
        ConfigError: If ranks disagree about a tensor, or parts of one are held by nobody; names it.
    """
    by_name: dict[str, dict[int, Part]] = {}
    for rank, parts in enumerate(held):
        for name, part in parts.items():
            by_name.setdefault(name, {})[rank] = part
    return {name: _entry(name, parts) for name, parts in by_name.items()}


def _entry(name: str, parts: Mapping[int, Part]) -> Entry:
    _require_one(name, "dtype", {rank: part.dtype for rank, part in parts.items()})
    starts, shape = _line_up(name, parts)
    unwritten = Entry(next(iter(parts.values())).dtype, shape, (), starts)
    holders: dict[Box, list[int]] = {}
    for rank, part in parts.items():
        holders.setdefault(unwritten.box_of(part), []).append(rank)
    if not cover(holders, shape):
        raise ConfigError(
            f"the ranks hold {sum(box.count for box in holders)} of the {math.prod(shape)} elements of {name!r}, shape "
            f"{list(shape)}. Every part must be held by some rank that calls save."
        )
    pieces = [p for box, ranks in holders.items() for p in _pieces(name, box, ranks, parts[ranks[0]])]
    return Entry(unwritten.dtype, shape, tuple(pieces), starts)


def _pieces(name: str, box: Box, ranks: Sequence[int], part: Part) -> list[Piece]:
    if not box.count:
        return []
    if not part.split:
        return [Piece(box, min(ranks))]
    parts = max(1, min(len(ranks), box.count * part.item_bytes // PIECE_BYTES))
    # Small tensors go to ranks by their names, so that each writes about as much as any other.
    first = zlib.crc32(name.encode())
    return [Piece(cut, ranks[(first + i) % len(ranks)]) for i, cut in enumerate(box.split(parts))]


def _line_up(name: str, parts: Mapping[int, Part]) -> tuple[dict[int, tuple[int, ...]], tuple[int, ...]]:
    """Return where every slice starts along the dims that are cut, and the shape of the whole tensor."""
    _require_one(name, "cut", {rank: [(dim, n) for dim, _, n in part.slices] for rank, part in parts.items()})
    some = next(iter(parts.values()))
    starts, shape = {}, list(some.shape)
    for position, (dim, _, count) in enumerate(some.slices):
        sizes = {part.slices[position][1]: part.shape[dim] for part in parts.values()}
        if len(sizes) < count:
            raise ConfigError(f"{count - len(sizes)} of {count} slices of {name!r} are held by no rank.")
        *before, shape[dim] = accumulate((sizes[index] for index in range(count)), initial=0)
        starts[dim] = tuple(before)
    uncut = {rank: [n for d, n in enumerate(part.shape) if d not in starts] for rank, part in parts.items()}
    _require_one(name, "shape", uncut)
    return starts, tuple(shape)


def _require_one(name: str, what: str, found: Mapping[int, Any]) -> None:
    values = list(found.values())
    if any(value != values[0] for value in values):
        other = next(rank for rank, value in found.items() if value != values[0])
        first = next(iter(found))
        raise ConfigError(
            f"{what} of {name!r} is {found[first]} on rank {first} and {found[other]} on rank {other}. Let every rank "
            "hold the same model and optimizer, or mark a parameter that is cut as param.is_distributed = True."
        )
