"""`unique`, `merge`: deduplicate ids, sum their gradients, and split them by server (native, or NumPy).

The native core does the work; the NumPy twins give the same and take over where it is not installed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import ConfigError
from phalanx.ps.table.arrays import Keys, Rows
from phalanx.ps.table.placement import owner_of, shard_of
from phalanx.versions import HAS_NATIVE

Places = NDArray[np.int64]


def unique(ids: Sequence[Keys]) -> tuple[Keys, Places, NDArray[np.uint32]]:
    """Find the distinct ids of several arrays laid end to end.

    Args:
        ids: int64 arrays of any shape.

    Returns:
        The distinct ids in the order of their first occurrence, shape (u,); for each id given, its place among them,
        shape (total,); and how often each occurs, shape (u,).
    """
    if not HAS_NATIVE:
        return unique_numpy(ids)
    from phalanx import _core

    flat = [np.ascontiguousarray(part).reshape(-1) for part in ids]
    places = np.empty(sum(part.size for part in flat), np.int64)
    keys, counts = _core.unique(flat, places)
    return keys, places, counts


def unique_numpy(ids: Sequence[Keys]) -> tuple[Keys, Places, NDArray[np.uint32]]:
    """Return what `unique` does, computed with NumPy alone."""
    flat = np.concatenate([np.empty(0, np.int64), *(part.reshape(-1) for part in ids)])
    ordered, first, inverse, counts = np.unique(flat, return_index=True, return_inverse=True, return_counts=True)
    order = np.argsort(first)
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order))
    return ordered[order], ranks[inverse], counts[order].astype(np.uint32)


def merge(keys: Sequence[Keys], values: Sequence[Rows], weights: Sequence[float]) -> tuple[Keys, Rows]:
    """Add up rows of the same id, each times the weight of its part, in the order given.

    The order of the additions is fixed, so the same parts give the same bits.

    Args:
        keys: Ids of each part, at least one part.
        values: Rows of each part, (n, dim).
        weights: One per part; rounded to float32.

    Returns:
        The distinct ids in the order of their first occurrence, and their sums, shape (u, dim).

    Raises:
        ConfigError: If there is no part, or the parts do not have one row per id and one dim.
    """
    dim = _dim_of(keys, values, weights)
    distinct, places, _ = unique(keys)
    sums = np.zeros((len(distinct), dim), np.float32)
    start = 0
    for part, weight in zip(values, weights, strict=True):
        _add_weighted(places[start : start + len(part)], part, weight, sums)
        start += len(part)
    return distinct, sums


def split_by_owner(keys: Keys, salt: int, servers: int) -> tuple[Places, Places]:
    """Sort ids by the server that owns them, keeping their order within one server. NumPy twin of `csrc/unique.h`.

    Returns:
        The positions in the order of the servers, shape (n,), and where each server's part begins and the last one
        ends, shape (servers + 1,).
    """
    owners = owner_of(shard_of(keys, salt), servers)
    order = np.argsort(owners, kind="stable")
    return order, np.searchsorted(owners[order], np.arange(servers + 1))


def _add_weighted(places: Places, rows: Rows, weight: float, sums: Rows) -> None:
    if HAS_NATIVE:
        from phalanx import _core

        _core.add_weighted(places, np.ascontiguousarray(rows), weight, sums)
    else:
        np.add.at(sums, places, np.float32(weight) * rows)


def _dim_of(keys: Sequence[Keys], values: Sequence[Rows], weights: Sequence[float]) -> int:
    shapes = [part.shape for part in values]
    dims = {shape[1:] for shape in shapes}
    if len(dims) != 1 or [len(part) for part in keys] != [shape[0] for shape in shapes] or len(weights) != len(keys):
        raise ConfigError(
            f"Asked to add up rows of shapes {shapes} for {[len(part) for part in keys]} ids with {len(weights)} "
            "weights. Give parts of one width, each with one row per id and one weight."
        )
    return int(shapes[0][1])
