"""`Lookup`: read embedding rows from a snapshot for inference, without servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from phalanx.ps.snapshot.read import Snapshot, open_snapshot
from phalanx.ps.stores.base import Keys, Rows
from phalanx.ps.stores.update import check_keys
from phalanx.ps.table.placement import SHARDS
from phalanx.ps.table.table import RowTable, make_table, read_rows


class Lookup:
    """The rows that training would pull, from a snapshot of any mode but text.

    Args:
        directory: Folder of the snapshot.

    Raises:
        ConfigError: If the folder holds none.
        DataError: If a file is broken; names file and offset.
    """

    def __init__(self, directory: Path | str) -> None:
        self.snapshot = open_snapshot(directory)
        self._tables = {name: _Rows(self.snapshot, name) for name in self.snapshot.tables}

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
        return self._tables[table].at(ids)


class _Rows:
    def __init__(self, snapshot: Snapshot, name: str) -> None:
        spec = snapshot.tables[name]
        parts = [c for shard in range(SHARDS) if (c := snapshot.columns(name, shard)) is not None]
        keys = np.concatenate([np.empty(0, np.int64), *(c.keys for c in parts)])
        values = np.concatenate([np.empty((0, spec.dim), np.float32), *(c.rows[:, : spec.dim] for c in parts)])
        order = np.argsort(keys)
        self._keys, self._values = keys[order], values[order]
        # An empty table knows what an id without a row reads as.
        self._unmade: RowTable = make_table(spec)

    def at(self, ids: Keys) -> Rows:
        out = np.empty((len(ids), self._values.shape[1]), np.float32)
        places = np.searchsorted(self._keys, ids)
        is_saved = places < len(self._keys)
        is_saved[is_saved] = self._keys[places[is_saved]] == ids[is_saved]
        out[is_saved] = self._values[places[is_saved]]
        out[~is_saved] = read_rows(self._unmade, np.ascontiguousarray(ids[~is_saved]))
        return out
