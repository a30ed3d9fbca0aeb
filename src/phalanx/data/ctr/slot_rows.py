"""`SlotRows`: click-log rows as arrays; select, concatenate, convert to tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # whoever has rows as arrays needs no torch
    from torch import Tensor

Batch: TypeAlias = "tuple[Tensor, ...]"
"""(dense, ids, label), or (dense, ids, offsets, label) where slots hold any number of ids; without label where none is.

dense is float32 (n, dense fields), label float32 (n,). ids is int64 (n, slots); with offsets it is (ids,), and
offsets (n * slots + 1,) says where bag row * slots + slot begins and the last one ends.
"""


@dataclass(frozen=True, slots=True)
class SlotRows:
    """Rows of a click log as arrays."""

    label: NDArray[np.float32]
    """Shape (n,); (0,) when the schema has no label."""

    dense: NDArray[np.float32]
    """Shape (n, dense fields)."""

    ids: NDArray[np.int64]
    """Shape (n, slots), or (ids,) with `offsets`: row by row, and slot by slot within a row."""

    offsets: NDArray[np.int64] | None = None
    """Shape (n * slots + 1,): bag row * slots + slot holds ids[offsets[bag]:offsets[bag + 1]]. None: one id a slot."""

    def __len__(self) -> int:
        return len(self.dense)

    @property
    def lengths(self) -> NDArray[np.int64] | None:
        """How many ids each bag has, shape (n, slots); None without offsets."""
        if self.offsets is None:
            return None
        slots = (len(self.offsets) - 1) // max(len(self), 1)
        return np.diff(self.offsets).reshape(len(self), slots)

    def take(self, rows: NDArray[np.int64]) -> SlotRows:
        """Return these rows, in this order."""
        label = self.label[rows] if len(self.label) else self.label
        if self.offsets is None:
            return SlotRows(label, self.dense[rows], self.ids[rows])
        lengths = self.lengths
        assert lengths is not None
        bag_lengths = lengths[rows]
        ends = bag_lengths.sum(1).cumsum()
        begins = np.concatenate([[0], ends[:-1]])
        sources = self.offsets[rows * lengths.shape[1]]
        total = int(ends[-1]) if len(ends) else 0
        positions = np.arange(total) + np.repeat(sources - begins, ends - begins)
        return from_lengths(label, self.dense[rows], self.ids[positions], bag_lengths)

    def slice(self, start: int, stop: int) -> SlotRows:
        """Return rows start to stop - 1; without offsets as views."""
        label = self.label[start:stop]
        if self.offsets is None:
            return SlotRows(label, self.dense[start:stop], self.ids[start:stop])
        slots = (len(self.offsets) - 1) // max(len(self), 1)
        offsets = self.offsets[start * slots : min(stop, len(self)) * slots + 1]
        return SlotRows(label, self.dense[start:stop], self.ids[offsets[0] : offsets[-1]], offsets - offsets[0])

    def tensors(self) -> Batch:
        """Return the rows as a batch in new memory, so that changing it leaves the rows as they are."""
        import torch

        parts = [self.dense, self.ids, *([] if self.offsets is None else [self.offsets])]
        if len(self.label) or not len(self):
            parts.append(self.label)
        return tuple(torch.from_numpy(np.array(part, order="C")) for part in parts)


def from_lengths(
    label: NDArray[np.float32], dense: NDArray[np.float32], ids: NDArray[np.int64], lengths: NDArray[np.int64]
) -> SlotRows:
    """Return rows whose bags have these lengths, shape (n, slots)."""
    return SlotRows(label, dense, ids, np.concatenate([[0], lengths.reshape(-1).cumsum()]))


def join(parts: Sequence[SlotRows]) -> SlotRows:
    """Return the rows of all parts, one after the other; at least one part."""
    if len(parts) == 1:
        return parts[0]
    label = np.concatenate([p.label for p in parts])
    dense, ids = np.concatenate([p.dense for p in parts]), np.concatenate([p.ids for p in parts])
    if parts[0].offsets is None:
        return SlotRows(label, dense, ids)
    bags = np.concatenate([np.diff(p.offsets) for p in parts if p.offsets is not None])
    return SlotRows(label, dense, ids, np.concatenate([[0], bags.cumsum()]))
