"""`ConsistencyMode`: pull and push of a worker in sync, async, half-async and bounded-staleness training.

`ConsistencyMode` itself sends every step unchanged: sync and bounded staleness (SSP), which differ in what the servers
wait for. `AsyncMode` may also prefetch, `HalfAsyncMode` sends the sum of several steps, `phalanx.ps.client.geo.GeoMode`
trains a replica. The exact definitions are in `docs/design/parameter-server.md`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phalanx.ps.client.update_sums import sum_updates
from phalanx.ps.stores.base import PendingRows, PullSpec, Rows, TableStore
from phalanx.ps.stores.update import TableUpdate
from phalanx.ps.table.rules import TableSpec

MAX_PREFETCHED = 64
"""Tables' parts that are remembered of pulls ahead; older ones that no pull took are dropped."""


class ConsistencyMode:
    """Sends each step's gradients as one push. One thread of one worker uses a mode."""

    def __init__(self, store: TableStore) -> None:
        self.store = store
        """The tables; for reports, shrinking and snapshots, which no mode changes."""

        self.step = 0
        """Optimizer steps of this worker so far."""

        self.pushes = 0
        """Pushes made so far; a mode may need several steps for one."""

        self._has_left = False

    def declare(self, specs: Sequence[TableSpec]) -> None:
        """Make these tables, or check that they are there with the same specification.

        Raises:
            ConfigError: If a table of this name has another specification, or this mode cannot train it.
        """
        self.store.declare(specs)

    def pull(self, pull_specs: Sequence[PullSpec]) -> PendingRows:
        """Ask for the rows that the next step computes with; `rows()` of what comes back waits for them."""
        return self.store.pull(pull_specs, step=self.pushes)

    def prefetch(self, pull_specs: Sequence[PullSpec]) -> None:
        """Say which rows a later step will pull. Only async mode asks for them now: the others promise newer rows."""

    def push(self, updates: Sequence[TableUpdate], weight: float = 1.0, then: Sequence[PullSpec] = ()) -> PendingRows:
        """End an optimizer step. Every step must end, with an empty list where there is nothing to send.

        Args:
            updates: Gradients, at most one entry per table.
            weight: Rows of the batch that the gradients are the mean of; sync mode averages by it.
            then: Rows to read as a pull of the next step would find them, without a request for it where that is
                possible.

        Returns:
            The rows of `then`.
        """
        pulled = self._send(updates, weight, then)
        self.step += 1
        return pulled

    def assign(self, updates: Sequence[TableUpdate]) -> None:
        """Give rows their first values; returns once they are in place.

        It is no optimizer step, but in sync mode it is one push, so every worker calls it, with an empty list where
        another worker gives the values.

        Args:
            updates: Changes of kind `assign`.
        """
        self._send(updates)
        self.store.flush()

    def flush(self) -> None:
        """Send what is held back and wait until every push is acknowledged: call it before a snapshot."""
        self.store.flush()

    def load(self, directory: Path, names: Sequence[str] | None = None) -> dict[str, object]:
        """Replace rows by those of a snapshot; what this worker holds back is dropped. See `TableStore.load`."""
        self._forget()
        return self.store.load(directory, names)

    def finish(self) -> None:
        """Send what is held back, and say that this worker pushes no more. Safe to call twice."""
        if self._has_left:
            return
        self.flush()
        self.store.leave()
        self._has_left = True

    def _forget(self) -> None:
        """Drop rows and changes that this worker holds."""

    def _send(self, updates: Sequence[TableUpdate], weight: float = 1.0, then: Sequence[PullSpec] = ()) -> PendingRows:
        pulled = self.store.push(updates, step=self.pushes, weight=weight, then=then)
        self.pushes += 1
        return pulled


class AsyncMode(ConsistencyMode):
    """Sends each step as it is, and takes rows that were asked for ahead: they lack the steps taken since."""

    def __init__(self, store: TableStore) -> None:
        super().__init__(store)
        self._names: set[str] = set()
        self._prefetched: deque[_PulledTable] = deque(maxlen=MAX_PREFETCHED)

    def declare(self, specs: Sequence[TableSpec]) -> None:
        """Make these tables. See `ConsistencyMode.declare`."""
        super().declare(specs)
        self._names |= {spec.name for spec in specs}

    def prefetch(self, pull_specs: Sequence[PullSpec]) -> None:
        """Ask for the rows of a later step; a pull of the same keys then takes them. Skips tables not declared yet."""
        declared = [pull_spec for pull_spec in pull_specs if pull_spec.table in self._names]
        if declared:
            pulled = self.store.pull(declared, step=self.pushes)
            self._prefetched.extend(_PulledTable(pull_spec, pulled, index) for index, pull_spec in enumerate(declared))

    def pull(self, pull_specs: Sequence[PullSpec]) -> PendingRows:
        """Take the rows that were asked for ahead, and ask for the others. See `ConsistencyMode.pull`."""
        prefetched = [self._take(pull_spec) for pull_spec in pull_specs]
        if not any(prefetched):
            return super().pull(pull_specs)
        others = [pull_spec for pull_spec, prefetch in zip(pull_specs, prefetched, strict=True) if prefetch is None]
        pulled = super().pull(others) if others else None
        rest = iter(_PulledTable(pull_spec, pulled, index) for index, pull_spec in enumerate(others) if pulled)
        return _CombinedRows([prefetch or next(rest) for prefetch in prefetched])

    def _forget(self) -> None:
        self._prefetched.clear()

    def _take(self, pull_spec: PullSpec) -> _PulledTable | None:
        for prefetch in self._prefetched:
            if prefetch.pull_spec.table == pull_spec.table and np.array_equal(prefetch.pull_spec.keys, pull_spec.keys):
                self._prefetched.remove(prefetch)
                return prefetch
        return None


@dataclass(frozen=True, slots=True, eq=False)
class _PulledTable:
    """One table's part of a pull."""

    pull_spec: PullSpec
    pulled: PendingRows
    index: int


@dataclass(frozen=True, slots=True)
class _CombinedRows:
    """Parts of several pulls."""

    parts: list[_PulledTable]

    def rows(self) -> list[Rows]:
        """Wait and return the rows of each part."""
        return [part.pulled.rows()[part.index] for part in self.parts]


class HalfAsyncMode(ConsistencyMode):
    """Adds up the gradients of several own steps, sends the sum as one push and waits until it is applied."""

    def __init__(self, store: TableStore, *, steps: int) -> None:
        super().__init__(store)
        self._steps = steps
        self._unsent: list[Sequence[TableUpdate]] = []

    def push(self, updates: Sequence[TableUpdate], weight: float = 1.0, then: Sequence[PullSpec] = ()) -> PendingRows:
        """End an optimizer step; every `steps`-th sends the sum. See `ConsistencyMode.push`."""
        self.step += 1
        self._unsent.append(updates)
        if len(self._unsent) >= self._steps:
            self.flush()
        return self.pull(then)

    def flush(self) -> None:
        """Send the steps held back, if any, and wait until they are applied."""
        if self._unsent:
            self._send(sum_updates([update for updates in self._unsent for update in updates]))
            self._forget()
        self.store.flush()

    def _forget(self) -> None:
        self._unsent.clear()
