"""Ids that occur more than once, and ids that go to several servers: what happens around a table's calls."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from phalanx.ps.placement import owner_of, shard_of

Keys = NDArray[np.int64]
Floats = NDArray[np.float32]


def unique(ids: Sequence[Keys]) -> tuple[Keys, Keys, NDArray[np.uint32]]:
    """Find the distinct ids of several arrays laid end to end.

    Args:
        ids: int64 arrays of any shape.

    Returns:
        The distinct ids in the order of their first occurrence, shape (u,); for each id given, its place among them,
        shape (total,); and how often each occurs, shape (u,).
    """
    return unique_numpy(ids)


def unique_numpy(ids: Sequence[Keys]) -> tuple[Keys, Keys, NDArray[np.uint32]]:
    """Return what `unique` does, computed with NumPy alone."""
    flat = np.concatenate([np.empty(0, np.int64), *(part.reshape(-1) for part in ids)])
    ordered, first, inverse, counts = np.unique(flat, return_index=True, return_inverse=True, return_counts=True)
    order = np.argsort(first)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return ordered[order], place[inverse], counts[order].astype(np.uint32)


def merge(keys: Sequence[Keys], values: Sequence[Floats], weights: Sequence[float]) -> tuple[Keys, Floats]:
    """Add up rows of the same id, each times the weight of its part, in the order given.

    The order of the additions is fixed, so the same parts give the same bits.

    Args:
        keys: Ids of each part, unique within it.
        values: Rows of each part, (n, dim).
        weights: One per part; rounded to float32.

    Returns:
        The distinct ids in the order of their first occurrence, and their sums, shape (u, dim).
    """
    distinct, places, _ = unique(keys)
    sums = np.zeros((len(distinct), values[0].shape[1] if values else 0), np.float32)
    start = 0
    for part, weight in zip(values, weights, strict=True):
        sums[places[start : start + len(part)]] += np.float32(weight) * part
        start += len(part)
    return distinct, sums


def split_by_owner(keys: Keys, salt: int, servers: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sort ids by the server that owns them, keeping their order within one server.

    Returns:
        The positions in the order of the servers, shape (n,), and where each server's part begins and the last one
        ends, shape (servers + 1,).

    Raises:
        ConfigError: If there are fewer than 1 or more than 1024 servers.
    """
    owners = owner_of(shard_of(keys, salt), servers)
    order = np.argsort(owners, kind="stable")
    offsets = np.searchsorted(owners[order], np.arange(servers + 1))
    return order, offsets
