"""`TableSet`: the tables of one server, with their counters."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import numpy as np

from phalanx.errors import ConfigError, did_you_mean
from phalanx.ps.snapshot.read import SnapshotSource
from phalanx.ps.stores.update import TableUpdate, check_keys
from phalanx.ps.table.arrays import Keys, Rows
from phalanx.ps.table.reference import ReferenceTable
from phalanx.ps.table.rules import TableSpec
from phalanx.ps.table.table import RowTable

_log = logging.getLogger("phalanx.ps")
_Table = TypeVar("_Table")
_COUNTS = ("pushed", "dropped", "evicted")

_ROUNDS = (
    "table %s: values of rows that leave memory are rounded to %s (file_dtype), at moments that differ by run. "
    "Every push counts once, but results are not bit for bit those of another run, of a run in which a server starts "
    "again, or of a table in memory."
)


class TableSet:
    """Tables by name. Pulls may run beside each other and beside a change; one thread at a time changes."""

    def __init__(self) -> None:
        self.tables: dict[str, RowTable] = {}
        self._guards: dict[str, AbstractContextManager[Any]] = {}
        self._counted: dict[str, list[int]] = {}

    @property
    def specs(self) -> Mapping[str, TableSpec]:
        """Specifications by name, in the order the tables were made."""
        return {name: table.spec for name, table in self.tables.items()}

    def add(self, table: RowTable) -> None:
        """Add a table, in place of the one of its name if there is one."""
        name = table.spec.name
        if name in self.tables:
            with self._guards[name]:
                self._counted[name] = self.counts()[name]
                self.tables[name] = table
            return
        if table.spec.rounds_in_files and not isinstance(table, ReferenceTable):
            _log.warning(_ROUNDS, name, table.spec.file_dtype)
        # The reference table is for one thread at a time.
        self._guards[name] = threading.Lock() if isinstance(table, ReferenceTable) else nullcontext()
        self.tables[name] = table

    def load(self, source: SnapshotSource, specs: Sequence[TableSpec], shards: Sequence[int]) -> None:
        """Add tables with the rows of a snapshot; all are read before the first is put in place.

        Raises:
            ConfigError: If the snapshot has no such table, or one of another dim.
            DataError: If it is broken; nothing is changed then.
        """
        for table in [source.table(spec, shards) for spec in specs]:
            self.add(table)

    def pull(self, name: str, keys: Keys, empty: Callable[..., Rows] = np.empty) -> Rows:
        """Read rows of a table into an array that `empty` makes, shape (n, dim).

        Raises:
            ConfigError: If there is no such table, or these are no keys.
        """
        spec = get_table(self.tables, name).spec
        check_keys(spec, keys)
        rows = empty((len(keys), spec.dim), np.float32)
        with self._guards[name]:
            self.tables[name].pull(keys, rows)
        return rows

    def check(self, update: TableUpdate) -> None:
        """Check that an update can be applied.

        Raises:
            ConfigError: If there is no such table, or the update does not fit it.
        """
        update.check(get_table(self.tables, update.table).spec)

    def require_room(self, names: Iterable[str]) -> None:
        """Check that these tables can be pushed to, so that none of them is changed when another has no room.

        Raises:
            BackendError: As `RowTable.require_room`.
        """
        for name in names:
            self.tables[name].require_room()

    def apply(self, update: TableUpdate) -> int:
        """Apply a checked update and return how many gradients were dropped."""
        with self._guards[update.table]:
            return _apply(self.tables[update.table], update)

    def shrink(self, name: str) -> int:
        """End a day of a table and return how many rows went."""
        with self._guards[name]:
            return self.tables[name].shrink()

    @property
    def bytes(self) -> int:
        """Bytes of all rows and indexes."""
        return sum(table.bytes for table in self.tables.values())

    def report(self) -> dict[str, dict[str, int]]:
        """Return the counts of each table; those of changes include what was before a restart."""
        return {
            name: {
                "rows": table.rows,
                "bytes": table.bytes,
                **dict(zip(_COUNTS, counts, strict=True)),
                "pulled": table.pulled,
                "missed": table.missed,
            }
            for (name, table), counts in zip(list(self.tables.items()), self.counts().values(), strict=True)
        }

    def counts(self) -> dict[str, list[int]]:
        """Return pushed, dropped and evicted rows of each table since the job began."""
        none = [0] * len(_COUNTS)
        return {
            name: [before + getattr(t, c) for c, before in zip(_COUNTS, self._counted.get(name, none), strict=True)]
            for name, t in list(self.tables.items())
        }

    def count_from(self, counts: Mapping[str, list[int]]) -> None:
        """Continue counting from what `counts` returned before a restart."""
        self._counted = {name: list(c) for name, c in counts.items()}


def get_table(tables: Mapping[str, _Table], name: str) -> _Table:
    """Return what is kept of the table of this name.

    Raises:
        ConfigError: If nobody declared it; names the tables there are.
    """
    try:
        return tables[name]
    except KeyError:
        raise ConfigError(
            f"There is no table {name!r}; tables: {sorted(tables)}.{did_you_mean(name, tables)}"
        ) from None


def _apply(table: RowTable, update: TableUpdate) -> int:
    """Apply one update to a table and return how many gradients were dropped."""
    if update.kind == "delta":
        table.add(update.keys, update.values)
        return 0
    if update.kind == "assign":
        table.assign(update.keys, update.values)
        return 0
    return table.push(update.keys, update.values, update.lr, update.counts, update.shows, update.clicks)
