"""Merge several updates into one per table: the sum over steps. Servers average in `csrc/server_push.cc`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from phalanx.ps.stores.base import Rows
from phalanx.ps.stores.dedup import merge
from phalanx.ps.stores.update import TableUpdate


def sum_updates(updates: Sequence[TableUpdate]) -> list[TableUpdate]:
    """Return one change per table: gradients, counts, shows and clicks added up per id, at the last learning rate."""
    tables: dict[str, list[TableUpdate]] = {}
    for update in updates:
        tables.setdefault(update.table, []).append(update)
    return [_sum_table(table_updates) for table_updates in tables.values()]


def _sum_table(updates: list[TableUpdate]) -> TableUpdate:
    last = updates[-1]
    if len(updates) == 1:
        return last
    dim = last.values.shape[1]
    has_statistics = last.shows is not None or last.clicks is not None
    # Counts up to 2**24 are exact in float32.
    columns = [_columns(update, has_statistics) for update in updates]
    keys, total = merge([update.keys for update in updates], columns, [1.0] * len(updates))
    return TableUpdate(
        table=last.table,
        keys=keys,
        values=np.ascontiguousarray(total[:, :dim]),
        lr=last.lr,
        counts=total[:, dim].astype(np.uint32),
        shows=total[:, dim + 1].copy() if has_statistics else None,
        clicks=total[:, dim + 2].copy() if has_statistics else None,
    )


def _columns(update: TableUpdate, has_statistics: bool) -> Rows:
    """Return values, counts and (where the table keeps them) shows and clicks side by side, one line per id."""
    counts = np.ones(len(update.keys), np.float32) if update.counts is None else update.counts
    columns = [update.values, counts]
    if has_statistics:
        # The defaults of a table: every occurrence a show, none a click.
        columns += [counts if update.shows is None else update.shows]
        columns += [np.zeros(len(counts), np.float32) if update.clicks is None else update.clicks]
    return np.column_stack(columns).astype(np.float32, copy=False)
