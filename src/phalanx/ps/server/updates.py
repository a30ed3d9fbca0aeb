"""What pulls and pushes of sessions in Python, and pushes from the log, look like to the native engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from phalanx.ps.snapshot.records import Array
from phalanx.ps.stores.base import Keys
from phalanx.ps.stores.tables import TableSet, get_table
from phalanx.ps.stores.update import COLUMNS, KINDS, TableUpdate, check_keys, unpack_updates
from phalanx.ps.table.placement import table_salt

EngineUpdate = tuple[int, int, int, Keys | None, Array, float | None, Array | None, Array | None, Array | None]
"""Salt, kind, number of the pull that the keys came with (0: they come along), keys, values, rate and `COLUMNS`."""


def engine_pulls(tables: TableSet, names: Sequence[str], keys: Sequence[Keys]) -> list[tuple[int, Keys]]:
    """Return the salt and keys of each table.

    Raises:
        ConfigError: If there is no such table, or these are no keys.
    """
    for name, of_table in zip(names, keys, strict=True):
        check_keys(get_table(tables.tables, name).spec, of_table)
    return [(table_salt(name), of_table) for name, of_table in zip(names, keys, strict=True)]


def sent_updates(
    tables: TableSet, described: Sequence[Mapping[str, Any]], arrays: Sequence[Array]
) -> list[EngineUpdate]:
    """Return the updates of a push, as `unpack_updates` reads them.

    Raises:
        ConfigError: If there are too few or too many arrays, or an update does not fit its table.
    """
    updates = unpack_updates(described, arrays)
    _check(tables, updates)
    return [_pack(update, _pull_of(sent)) for update, sent in zip(updates, described, strict=True)]


def engine_updates(tables: TableSet, updates: Sequence[TableUpdate]) -> list[EngineUpdate]:
    """Return updates that bring their keys.

    Raises:
        ConfigError: If there is no such table, or an update does not fit it.
    """
    _check(tables, updates)
    return [_pack(update, 0) for update in updates]


def _check(tables: TableSet, updates: Sequence[TableUpdate]) -> None:
    for update in updates:
        tables.check(update)


def _pack(update: TableUpdate, pull: int) -> EngineUpdate:
    columns = [getattr(update, name) for name in COLUMNS]
    counts, shows, clicks = (None if column is None else np.ascontiguousarray(column) for column in columns)
    keys, lr = None if pull else update.keys, None if update.lr is None else float(update.lr)
    kind = KINDS.index(update.kind)
    return table_salt(update.table), kind, pull, keys, update.values, lr, counts, shows, clicks


def _pull_of(update: Mapping[str, Any]) -> int:
    """Return the number of the pull that an update names, 0 for none."""
    pull = update.get("pull")
    if pull is None:
        return 0
    if type(pull) is not int or not 0 < pull < 2**64:
        raise TypeError(f"a pull has the number {pull!r}")
    return pull
