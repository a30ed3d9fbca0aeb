"""The native table behind the checks that both tables share. Needs the native core."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from phalanx._core import EmbeddingTable
from phalanx.ps.table.arrays import Columns, Keys, Rows, check_columns, check_push, check_rows, check_shard
from phalanx.ps.table.placement import table_salt
from phalanx.ps.table.row_layout import layout_of
from phalanx.ps.table.rules import TableSpec


class NativeTable(EmbeddingTable):
    """See `phalanx.ps.table.table.RowTable`; the calling thread works in `csrc/table.h`, without the GIL."""

    def __init__(self, spec: TableSpec) -> None:
        self.spec, self.layout = spec, layout_of(spec)
        self._salt = table_salt(spec.name)
        super().__init__(spec, self.layout, self._salt)

    def pull(self, keys: Keys, out: Rows) -> None:
        """Read rows; changes nothing."""
        check_rows(self.spec, keys, out, "a place for rows")
        super().pull(keys, out)

    def push(
        self,
        keys: Keys,
        gradients: Rows,
        lr: float | None = None,
        counts: NDArray[np.uint32] | None = None,
        shows: NDArray[np.float32] | None = None,
        clicks: NDArray[np.float32] | None = None,
    ) -> int:
        """Apply gradients by the rule; returns how many were of ids not admitted."""
        check_rows(self.spec, keys, gradients, "gradients")
        check_push(self.spec, len(keys), lr, (counts, shows, clicks))
        return super().push(keys, gradients, self.spec.rule.lr if lr is None else lr, counts, shows, clicks)

    def add(self, keys: Keys, deltas: Rows) -> None:
        """Add to rows, making those that are missing."""
        check_rows(self.spec, keys, deltas, "deltas")
        super().add(keys, deltas)

    def assign(self, keys: Keys, values: Rows) -> None:
        """Replace the values of rows, making those that are missing; optimizer state stays."""
        check_rows(self.spec, keys, values, "values")
        super().assign(keys, values)

    def export(self, shard: int, since: int = 0) -> Columns:
        """Return a shard's rows, or those changed after tick `since`."""
        check_shard(shard)
        return Columns(*self.read_shard(shard, since))

    def restore(self, shard: int, columns: Columns) -> None:
        """Put exported columns in place of what the shard holds."""
        check_shard(shard)
        check_columns(self.spec, self._salt, shard, columns, self.layout.width)
        self.restore_shard(shard, *(getattr(columns, field.name) for field in fields(columns)))

    def keys(self, shard: int) -> Keys:
        """Return the ids of a shard that have a row, ordered by hash."""
        check_shard(shard)
        return super().keys(shard)
