"""The native table behind the checks that both tables share. Needs the native core."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from phalanx import _core
from phalanx.ps.arrays import Columns, check_columns, check_push, check_rows, check_shard
from phalanx.ps.layout import layout_of
from phalanx.ps.placement import table_salt
from phalanx.ps.rules import TableSpec

Keys = NDArray[np.int64]
Floats = NDArray[np.float32]


class NativeTable:
    """See `phalanx.ps.table.Table`; the work is done in `csrc/table.h`, without the GIL, by the calling thread."""

    def __init__(self, spec: TableSpec) -> None:
        self.spec, self.layout = spec, layout_of(spec)
        self._salt = table_salt(spec.name)
        self._core = _core.EmbeddingTable(spec, self.layout, self._salt)

    def pull(self, keys: Keys, out: Floats) -> None:
        """Read rows; changes nothing."""
        check_rows(self.spec, keys, out, "a place for rows")
        self._core.pull(keys, out)

    def push(
        self,
        keys: Keys,
        gradients: Floats,
        lr: float | None = None,
        counts: NDArray[np.uint32] | None = None,
        shows: Floats | None = None,
        clicks: Floats | None = None,
    ) -> int:
        """Apply gradients by the rule; returns how many were of ids not admitted."""
        check_rows(self.spec, keys, gradients, "gradients")
        check_push(self.spec, len(keys), lr, (counts, shows, clicks))
        return self._core.push(keys, gradients, self.spec.rule.lr if lr is None else lr, counts, shows, clicks)

    def add(self, keys: Keys, deltas: Floats) -> None:
        """Add to rows, making those that are missing."""
        check_rows(self.spec, keys, deltas, "deltas")
        self._core.add(keys, deltas)

    def assign(self, keys: Keys, values: Floats) -> None:
        """Replace the values of rows, making those that are missing; optimizer state stays."""
        check_rows(self.spec, keys, values, "values")
        self._core.assign(keys, values)

    def shrink(self) -> int:
        """End a day; returns how many rows went."""
        return self._core.shrink()

    def clear(self) -> None:
        """Drop everything but the counts of what happened."""
        self._core.clear()

    def export(self, shard: int, since: int = 0) -> Columns:
        """Return a shard's rows, or those changed after tick `since`."""
        check_shard(shard)
        return Columns(*self._core.export(shard, since))

    def restore(self, shard: int, columns: Columns) -> None:
        """Put exported columns in place of what the shard holds."""
        check_shard(shard)
        check_columns(self.spec, self._salt, shard, columns, self.layout.width)
        self._core.restore(
            shard,
            columns.keys,
            columns.ticks,
            columns.rows,
            columns.waiting_keys,
            columns.waiting_ticks,
            columns.waiting_counts,
            columns.days,
            columns.tick,
            columns.whole,
        )

    def keys(self, shard: int) -> Keys:
        """Return the ids of a shard that have a row, ordered by hash."""
        check_shard(shard)
        return self._core.keys(shard)

    def hold(self) -> None:
        """Keep every call out until `release`."""
        self._core.hold()

    def release(self) -> None:
        """End what `hold` began."""
        self._core.release()

    @property
    def rows(self) -> int:
        """Ids that have a row."""
        return self._core.rows

    @property
    def bytes(self) -> int:
        """Bytes of rows, those that were dropped and not used again included, and of the index."""
        return self._core.bytes

    @property
    def pushed(self) -> int:
        """Rows that pushes, additions and assignments named."""
        return self._core.pushed

    @property
    def dropped(self) -> int:
        """Gradients of ids that were not admitted."""
        return self._core.dropped

    @property
    def evicted(self) -> int:
        """Rows that `max_bytes` cost."""
        return self._core.evicted

    @property
    def tick(self) -> int:
        """Changes so far."""
        return self._core.tick
