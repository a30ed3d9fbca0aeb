"""What pushes from the log look like to the native engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from phalanx.ps.snapshot.records import Array
from phalanx.ps.stores.base import Keys
from phalanx.ps.stores.tables import TableSet
from phalanx.ps.stores.update import COLUMNS, KINDS, TableUpdate
from phalanx.ps.table.placement import table_salt

EngineUpdate = tuple[int, int, Keys, Array, float | None, Array | None, Array | None, Array | None]
"""Salt, kind, keys, values, rate and `COLUMNS`."""


def engine_updates(tables: TableSet, updates: Sequence[TableUpdate]) -> list[EngineUpdate]:
    """Return updates as the engine takes them.

    Raises:
        ConfigError: If there is no such table, or an update does not fit it.
    """
    for update in updates:
        tables.check(update)
    return [_pack(update) for update in updates]


def _pack(update: TableUpdate) -> EngineUpdate:
    columns = [getattr(update, name) for name in COLUMNS]
    counts, shows, clicks = (None if column is None else np.ascontiguousarray(column) for column in columns)
    lr = None if update.lr is None else float(update.lr)
    return table_salt(update.table), KINDS.index(update.kind), update.keys, update.values, lr, counts, shows, clicks
