"""`TableMoment`: a table as it was, to be read while changes continue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from phalanx.ps.table.arrays import Columns
from phalanx.ps.table.rules import TableSpec


class TableMoment(Protocol):
    """A table as it was when `RowTable.moment` returned this. Any threads may read it."""

    spec: TableSpec

    def export(self, shard: int) -> Columns:
        """Return what a shard held, as `RowTable.export` would have then. Read each shard once: its memory goes then.

        Args:
            shard: 0 to 1023.
        """
        ...

    def end(self) -> None:
        """Let go of what was not read. Nothing is being read meanwhile, or read after that."""
        ...


class CopiedMoment:
    """A moment of a table whose shards were all copied.

    Args:
        spec: The table's.
        shards: What `RowTable.export` returned for each.
    """

    def __init__(self, spec: TableSpec, shards: Sequence[Columns]) -> None:
        self.spec = spec
        self._shards = dict(enumerate(shards))

    def export(self, shard: int) -> Columns:
        """Return what a shard held, once."""
        return self._shards.pop(shard)

    def end(self) -> None:
        """Let go of what was not read."""
        self._shards.clear()
