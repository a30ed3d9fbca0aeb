"""`Lookup`: read embedding rows from a snapshot for inference, without servers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.ps.snapshot.read import Snapshot, map_shards, open_snapshot, values_only
from phalanx.ps.stores.base import Keys, Rows
from phalanx.ps.stores.update import check_keys
from phalanx.ps.table.placement import SHARDS
from phalanx.ps.table.reference import ReferenceTable
from phalanx.ps.table.rules import ShowClick, TableSpec
from phalanx.ps.table.table import RowTable, make_table, read_rows
from phalanx.ps.table.update_rules import SGD
from phalanx.ps.wire.progress import WorkProgress


class Lookup:
    """The rows that training would pull, from a snapshot of any mode but text. Any number of threads may read.

    Args:
        directory: Folder of the snapshot. It is read once, into memory.

    Raises:
        ConfigError: If the folder holds none.
        DataError: If a file is broken; names file and offset.
    """

    def __init__(self, directory: Path | str) -> None:
        self.snapshot = open_snapshot(directory)
        self.tables: dict[str, RowTable] = {name: _load(self.snapshot, name) for name in self.snapshot.tables}

    def extra(self) -> dict[str, Any]:
        """Return what was saved beside the tables."""
        return self.snapshot.extra()

    def rows(self, table: str, ids: Keys) -> Rows:
        """Return one row per id, shape (n, dim); an id without a row reads as it would in training.

        Args:
            table: Name of the table.
            ids: int64, shape (n,); an id may come several times.

        Raises:
            ConfigError: If the snapshot has no such table, or these are no ids.
        """
        self.snapshot.check_names([table])
        ids = np.ascontiguousarray(ids)
        check_keys(self.snapshot.tables[table], ids)
        return read_rows(self.tables[table], ids)


def _load(snapshot: Snapshot, name: str) -> RowTable:
    """Return a table with the values of all shards."""
    table = make_table(_reading_spec(snapshot.tables[name]))

    def load(shard: int) -> int:
        columns = snapshot.columns(name, shard)
        if columns is None:
            return 0
        values = np.ascontiguousarray(columns.rows[:, : table.spec.dim])
        table.restore(shard, values_only(columns.keys, values, columns.tick))
        return len(columns.keys)

    map_shards(load, range(SHARDS), WorkProgress("loads"), is_ordered=isinstance(table, ReferenceTable))
    return table


def _reading_spec(spec: TableSpec) -> TableSpec:
    """Return the specification of a table that reads the same rows: none are trained, and none make room for others."""
    entry = None if isinstance(spec.entry, ShowClick) else spec.entry  # which admits every id
    return replace(spec.without_limit(), rule=SGD(lr=0.0), entry=entry, unseen_days=None)
