"""Split keys and their rows by the server that owns them, and merge the replies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.ps.stores.base import Keys, Rows
from phalanx.ps.stores.dedup import split_by_owner

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class KeyPartition:
    """Which of n ids go to which server."""

    keys: list[Keys]
    """Each server's ids."""

    order: NDArray[np.int64] | None
    """Positions of the ids, server by server, shape (n,); None when one server has them all."""

    offsets: list[int]
    """Where each server's positions begin, and the last one's end."""

    @classmethod
    def of(cls, keys: Keys, salt: int, servers: int) -> KeyPartition:
        """Return the partition of a table's ids over so many servers."""
        if servers == 1:
            return cls([keys], None, [0, len(keys)])
        order, offsets = split_by_owner(keys, salt, servers)
        ordered = keys.take(order)
        return cls([ordered[start:end] for start, end in pairwise(offsets)], order, offsets.tolist())

    def parts(self, array: Array) -> list[Array]:
        """Return each server's part of what belongs to the ids, shape (n, ...)."""
        if self.order is None:
            return [array]
        ordered = array.take(self.order, axis=0)
        return [ordered[start:end] for start, end in pairwise(self.offsets)]

    def merge(self, parts: Mapping[int, Rows], dim: int) -> Rows:
        """Return rows in the order of the ids, shape (n, dim), from each server's part by its rank."""
        if self.order is None and parts:
            return parts[0]
        rows = np.empty((self.offsets[-1], dim), np.float32)
        for rank, part in parts.items():
            assert self.order is not None
            rows[self.order[self.offsets[rank] : self.offsets[rank + 1]]] = part
        return rows
