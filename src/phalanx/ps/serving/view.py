"""`TableView`: tables to read, with the version of their rows and when they were current."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from phalanx.errors import NotFoundError, did_you_mean
from phalanx.ps.stores.base import Keys, Rows
from phalanx.ps.table.placement import owner_of, shard_of, table_salt
from phalanx.ps.table.rules import TableSpec
from phalanx.ps.table.table import RowTable, read_rows


@dataclass(frozen=True, slots=True)
class TableView:
    """Tables, whole or in parts. Any number of threads may read."""

    parts: Sequence[Mapping[str, RowTable]]
    """Tables by name, of each server those of its shards; the whole tables if there is one part."""

    version: str
    """Changes with the rows. Rows are of this version, or newer if they follow servers."""

    as_of: float
    """Until when every change is in the rows, in seconds since 1970."""

    steps: Sequence[int] = ()
    """Pushes of each worker that the rows hold; none if that is not known."""

    @property
    def age_s(self) -> float:
        """Seconds since the rows were known to be current."""
        return max(0.0, time.time() - self.as_of)

    @property
    def specs(self) -> dict[str, TableSpec]:
        """Specifications by name. A table is there once every part has it."""
        first, *others = self.parts
        return {name: table.spec for name, table in first.items() if all(name in part for part in others)}

    def describe(self) -> list[dict[str, Any]]:
        """Return the name, dim and number of rows of each table."""
        return [
            {"name": name, "dim": spec.dim, "rows": sum(part[name].rows for part in self.parts)}
            for name, spec in self.specs.items()
        ]

    def spec(self, name: str) -> TableSpec:
        """Return the specification of a table.

        Raises:
            NotFoundError: If there is none of that name; names those there are.
        """
        specs = self.specs
        if name not in specs:
            raise NotFoundError(
                f"There is no table {name[:200]!r}; tables: {sorted(specs)}.{did_you_mean(name, specs)} "
                "GET /v1/tables lists them."
            )
        return specs[name]

    def rows(self, name: str, ids: Keys) -> Rows:
        """Return one row per id, float32, shape (n, dim); an id without a row reads as training would read it.

        Args:
            name: Name of the table.
            ids: int64, shape (n,), contiguous; an id may come several times.

        Raises:
            NotFoundError: If there is no such table.
        """
        spec = self.spec(name)
        if len(self.parts) == 1:
            return read_rows(self.parts[0][name], ids)
        owners = owner_of(shard_of(ids, table_salt(name)), len(self.parts))
        rows = np.empty((len(ids), spec.dim), np.float32)
        for number, part in enumerate(self.parts):
            is_owned = owners == number
            rows[is_owned] = read_rows(part[name], ids[is_owned])
        return rows


class TableReplica(Protocol):
    """A copy of tables that is kept current while it is read."""

    def view(self) -> TableView:
        """Return the tables of this moment."""
        ...

    def close(self) -> None:
        """Stop keeping it current."""
        ...
