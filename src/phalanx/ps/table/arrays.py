"""`Columns`: the rows of a table shard as arrays, with their checks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import ConfigError, DataError
from phalanx.ps.table.placement import SHARDS, shard_of
from phalanx.ps.table.rules import TableSpec

Keys = NDArray[np.int64]
Rows = NDArray[np.float32]

MOST_WAITED = 2**24 - 2
"""Highest count of an id that waits for a row."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Rows of one virtual shard, and what the table knows about them; ordered by the hash of the id."""

    keys: NDArray[np.int64]
    """Ids that have a row, shape (n,)."""

    ticks: NDArray[np.uint64]
    """Tick of the table at the last change of each row, shape (n,)."""

    rows: NDArray[np.float32]
    """Shape (n, width): values, optimizer state, show and click, in the order of `RowLayout`."""

    waiting_keys: NDArray[np.int64]
    """Ids that an entry filter counts and that have no row yet, shape (m,)."""

    waiting_ticks: NDArray[np.uint64]
    waiting_counts: NDArray[np.uint32]

    days: NDArray[np.uint64]
    """Tick at which each remembered day began, the day under way first; empty before the first `shrink`."""

    removed: NDArray[np.int64]
    """Ids that went since the tick that was asked for, shape (r,), ordered by hash; none if these are complete."""

    decays: int
    """How often show and click of every row decayed since then; 0 if these are complete."""

    tick: int
    """Tick of the table when these were read."""

    is_complete: bool
    """Whether this is all that the shard holds; if not, it is what changed since the tick that was asked for."""


def check_columns(spec: TableSpec, salt: int, shard: int, columns: Columns, width: int) -> None:
    """Check that columns fit the table and belong to the shard.

    Raises:
        DataError: If they do not; names the table and the shard.
    """
    where = f"shard {shard} of table '{spec.name}'"
    n, m = len(columns.keys), len(columns.waiting_keys)
    if columns.rows.shape != (n, width) or columns.ticks.shape != (n,):
        raise DataError(
            f"Asked to restore {where} from {n} keys, {len(columns.ticks)} ticks and rows of shape "
            f"{columns.rows.shape}, but a row has {width} columns. Restore it with the specification it was saved with."
        )
    if columns.waiting_ticks.shape != (m,) or columns.waiting_counts.shape != (m,):
        raise DataError(
            f"Asked to restore {where} from {m} waiting keys, {len(columns.waiting_counts)} counts and "
            f"{len(columns.waiting_ticks)} ticks. The snapshot is broken; use another one."
        )
    most = int(columns.waiting_counts.max(initial=0))
    if most > MOST_WAITED:
        raise DataError(
            f"Asked to restore {where} with a waiting count of {most}; the most is {MOST_WAITED}. "
            "The snapshot is broken; use another one."
        )
    if not 0 <= columns.decays <= len(columns.days):
        raise DataError(
            f"Asked to restore {where} with {columns.decays} decays in {len(columns.days)} days. "
            "The snapshot is broken; use another one."
        )
    for keys in (columns.keys, columns.waiting_keys, columns.removed):
        strange = np.flatnonzero(shard_of(keys, salt) != shard)
        if strange.size:
            raise DataError(
                f"Asked to restore {where}, but id {keys[strange[0]]} belongs to another shard. "
                "Restore the file of this table and this shard."
            )


def check_shard(shard: int) -> None:
    """Check the number of a shard.

    Raises:
        ConfigError: If there is no such shard.
    """
    if not 0 <= shard < SHARDS:
        raise ConfigError(f"Asked for shard {shard}; a table has shards 0 to {SHARDS - 1}.")
