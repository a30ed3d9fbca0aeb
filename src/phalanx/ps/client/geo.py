"""`GeoMode`: GEO-SGD: train local replicas of rows, push their differences every few steps.

Let W be the number of workers. On the first touch of a row in a window of `steps` steps a worker reads it (base), then
trains its copy with the rule of the table. At the end of the window it sends (copy - base) / W, which servers add up.
With W = 1 and windows of one step this is plain training.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import numpy as np

from phalanx.errors import ConfigError
from phalanx.ps.client.consistency import ConsistencyMode
from phalanx.ps.stores.base import Keys, PendingRows, PullSpec, ReadyRows, Rows, TableStore
from phalanx.ps.stores.dedup import unique
from phalanx.ps.stores.update import TableUpdate
from phalanx.ps.table.rules import Constant, TableSpec
from phalanx.ps.table.table import make_table, read_rows
from phalanx.ps.table.update_rules import SGD

logger = logging.getLogger("phalanx.ps")


class GeoMode(ConsistencyMode):
    """Trains replicas, and sends their difference every `steps` steps and at the end: ceil(steps / k) pushes."""

    def __init__(self, store: TableStore, *, steps: int, workers: int, local_optimizer: bool = False) -> None:
        super().__init__(store)
        self._steps = steps
        self._workers = workers
        self._local_optimizer = local_optimizer
        self._replicas: dict[str, _Replica] = {}
        self._in_window = 0

    def declare(self, specs: Sequence[TableSpec]) -> None:
        """Make these tables and their replicas. See `ConsistencyMode.declare`.

        Raises:
            ConfigError: If the rule of a table is not SGD and `local_optimizer` was not given, or the table has an
                entry policy.
        """
        for spec in specs:
            _check(spec, self._local_optimizer)
        self.store.declare(specs)
        for spec in specs:
            if spec.name not in self._replicas:
                self._replicas[spec.name] = _Replica(spec)

    def pull(self, pull_specs: Sequence[PullSpec]) -> PendingRows:
        """Read the rows that were not touched in this window yet, and return those of the replica."""
        self._read(pull_specs)
        return ReadyRows([self._replicas[pull_spec.table].rows(pull_spec.keys) for pull_spec in pull_specs])

    def push(self, updates: Sequence[TableUpdate], weight: float = 1.0, then: Sequence[PullSpec] = ()) -> PendingRows:
        """End an optimizer step on the replica; every `steps`-th sends the difference. See `ConsistencyMode.push`."""
        self.step += 1
        self._in_window += 1
        self._read([PullSpec(update.table, update.keys) for update in updates])
        for update in updates:
            self._replicas[update.table].train(update)
        if self._in_window >= self._steps:
            self._end_window()
        return self.pull(then)

    def assign(self, updates: Sequence[TableUpdate]) -> None:
        """Give rows their first values. See `ConsistencyMode.assign`."""
        super().assign(updates)
        self._forget()

    def flush(self) -> None:
        """Send the difference of a window that has begun, and wait until every push is acknowledged."""
        if self._in_window:
            self._end_window()
        self.store.flush()

    def _read(self, pull_specs: Sequence[PullSpec]) -> None:
        first = [
            PullSpec(pull_spec.table, self._replicas[pull_spec.table].unread(pull_spec.keys))
            for pull_spec in pull_specs
        ]
        first = [pull_spec for pull_spec in first if len(pull_spec.keys)]
        if first:
            arrived = self.store.pull(first, step=self.pushes).rows()
            for pull_spec, rows in zip(first, arrived, strict=True):
                self._replicas[pull_spec.table].learn(pull_spec.keys, rows)

    def _end_window(self) -> None:
        differences = [replica.difference(self._workers) for replica in self._replicas.values()]
        self._send([update for update in differences if len(update.keys)])
        self._forget()

    def _forget(self) -> None:
        self._in_window = 0
        for replica in self._replicas.values():
            replica.forget()


class _Replica:
    """This worker's copy of the rows of one table that it touched in the current window."""

    def __init__(self, spec: TableSpec) -> None:
        self._name, self._dim = spec.name, spec.dim
        self._is_stateless = spec.rule.state_columns(spec.dim) == 0
        self._copy = make_table(dataclasses.replace(spec.without_limit(), entry=None, dtype="float32"))
        # A row read in this window is `[base | 1]` here; any other id reads as zeros.
        self._base = make_table(
            TableSpec(name=f"{spec.name}/base", dim=spec.dim + 1, rule=SGD(lr=0.0), init=Constant(0.0))
        )
        self._trained: list[Keys] = []

    def unread(self, keys: Keys) -> Keys:
        """Return those of `keys` that were not read in this window."""
        return np.ascontiguousarray(keys[read_rows(self._base, keys)[:, self._dim] == 0])

    def learn(self, keys: Keys, rows: Rows) -> None:
        """Take rows as the servers have them."""
        self._copy.assign(keys, rows)
        self._base.assign(keys, np.column_stack([rows, np.ones(len(keys), np.float32)]))

    def rows(self, keys: Keys) -> Rows:
        """Return the copy's rows, shape (n, dim)."""
        return read_rows(self._copy, keys)

    def train(self, update: TableUpdate) -> None:
        """Apply gradients to the copy with the table's rule."""
        self._copy.push(update.keys, update.values, update.lr, None, None, None)
        self._trained.append(update.keys)

    def difference(self, workers: int) -> TableUpdate:
        """Return (copy - base) / workers of the rows trained in this window."""
        keys, _, _ = unique(self._trained)
        moved = self.rows(keys) - read_rows(self._base, keys)[:, : self._dim]
        return TableUpdate(self._name, keys, moved / np.float32(workers), kind="delta")

    def forget(self) -> None:
        """Begin a window. Optimizer state of a rule that has some stays with its rows."""
        self._trained.clear()
        self._base.clear()
        if self._is_stateless:
            self._copy.clear()


def _check(spec: TableSpec, local_optimizer: bool) -> None:
    rule, has_state = spec.rule.kind, spec.rule.state_columns(spec.dim) > 0
    if spec.entry is not None:
        raise ConfigError(
            f"table {spec.name!r} has the entry policy {spec.entry.kind!r}, and geo mode trains replicas, where no "
            "server can count occurrences. Use async mode, or drop `entry=`."
        )
    if not spec.rule.supports_deltas:
        raise ConfigError(
            f"table {spec.name!r} uses {type(spec.rule).__name__}, whose rows follow from sums of gradients; geo mode "
            "adds differences of rows. Use SGD, or another mode."
        )
    if has_state and not local_optimizer:
        raise ConfigError(
            f"table {spec.name!r} uses {rule!r}, and geo mode trains with SGD: it adds differences of rows, while "
            'optimizer state stays with each worker. Use SGD, or allow it: a_sync_configs = {"k_steps": ..., '
            '"local_optimizer": True}.'
        )
    if has_state:
        logger.warning(
            "geo: table %r trains with %r on each worker; its optimizer state stays with the worker.", spec.name, rule
        )
