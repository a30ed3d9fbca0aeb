"""What a worker does at a pull and at a push, in each training mode.

`Mode` itself sends every step as it is: sync and bounded staleness, which differ in what the servers wait for. `Async`
may also read ahead, `HalfAsync` sends the sum of several steps, `phalanx.ps.client.geo.Geo` trains a replica. The exact
definitions are in `docs/design/parameter-server.md`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phalanx.ps.stores.base import Change, Pulled, Rows, Store, Want
from phalanx.ps.stores.dedup import merge
from phalanx.ps.table.rules import TableSpec

MOST_AHEAD = 64
"""Tables' parts that are remembered of pulls ahead; older ones that no pull took are dropped."""


class Mode:
    """Sends each step's gradients as one push. One thread of one worker uses a mode."""

    def __init__(self, store: Store) -> None:
        self.store = store
        """The tables; for reports, shrinking and snapshots, which no mode changes."""

        self.step = 0
        """Optimizer steps of this worker so far."""

        self.pushes = 0
        """Pushes made so far; a mode may need several steps for one."""

        self._left = False

    def declare(self, specs: Sequence[TableSpec]) -> None:
        """Make these tables, or check that they are there with the same specification.

        Raises:
            ConfigError: If a table of this name has another specification, or this mode cannot train it.
        """
        self.store.declare(specs)

    def pull(self, wants: Sequence[Want]) -> Pulled:
        """Ask for the rows that the next step computes with; `rows()` of what comes back waits for them."""
        return self.store.pull(wants, step=self.pushes)

    def ahead(self, wants: Sequence[Want]) -> None:
        """Say which rows a later step will pull. Only async mode asks for them now: the others promise newer rows."""

    def push(self, changes: Sequence[Change], weight: float = 1.0, then: Sequence[Want] = ()) -> Pulled:
        """End an optimizer step. Every step must end, with an empty list where there is nothing to send.

        Args:
            changes: Gradients, at most one entry per table.
            weight: Rows of the batch that the gradients are the mean of; sync mode averages by it.
            then: Rows to read as a pull of the next step would find them, without a request for it where that is
                possible.

        Returns:
            The rows of `then`.
        """
        pulled = self._send(changes, weight, then)
        self.step += 1
        return pulled

    def assign(self, changes: Sequence[Change]) -> None:
        """Give rows their first values; returns once they are in place.

        It is no optimizer step, but in sync mode it is one push, so every worker calls it, with an empty list where
        another worker gives the values.

        Args:
            changes: Changes of kind `assign`.
        """
        self._send(changes)
        self.store.flush()

    def flush(self) -> None:
        """Send what is held back and wait until every push is acknowledged: call it before a snapshot."""
        self.store.flush()

    def load(self, directory: Path, names: Sequence[str] | None = None) -> dict[str, object]:
        """Replace rows by those of a snapshot; what this worker holds back is dropped. See `Store.load`."""
        self._forget()
        return self.store.load(directory, names)

    def finish(self) -> None:
        """Send what is held back, and say that this worker pushes no more. Safe to call twice."""
        if self._left:
            return
        self.flush()
        self.store.leave()
        self._left = True

    def _forget(self) -> None:
        """Drop rows and changes that this worker holds."""

    def _send(self, changes: Sequence[Change], weight: float = 1.0, then: Sequence[Want] = ()) -> Pulled:
        pulled = self.store.push(changes, step=self.pushes, weight=weight, then=then)
        self.pushes += 1
        return pulled


class Async(Mode):
    """Sends each step as it is, and takes rows that were asked for ahead: they lack the steps taken since."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._names: set[str] = set()
        self._asked: deque[_Ahead] = deque(maxlen=MOST_AHEAD)

    def declare(self, specs: Sequence[TableSpec]) -> None:
        """Make these tables. See `Mode.declare`."""
        super().declare(specs)
        self._names |= {spec.name for spec in specs}

    def ahead(self, wants: Sequence[Want]) -> None:
        """Ask for the rows of a later step; a pull of the same keys then takes them. Skips tables not declared yet."""
        known = [want for want in wants if want.table in self._names]
        if known:
            pulled = self.store.pull(known, step=self.pushes)
            self._asked.extend(_Ahead(want, pulled, place) for place, want in enumerate(known))

    def pull(self, wants: Sequence[Want]) -> Pulled:
        """Take the rows that were asked for ahead, and ask for the others. See `Mode.pull`."""
        found = [self._take(want) for want in wants]
        if not any(found):
            return super().pull(wants)
        others = [want for want, ahead in zip(wants, found, strict=True) if ahead is None]
        fresh = super().pull(others) if others else None
        rest = iter(_Ahead(want, fresh, place) for place, want in enumerate(others) if fresh)
        return _Gathered([ahead or next(rest) for ahead in found])

    def _forget(self) -> None:
        self._asked.clear()

    def _take(self, want: Want) -> _Ahead | None:
        for ahead in self._asked:
            if ahead.want.table == want.table and np.array_equal(ahead.want.keys, want.keys):
                self._asked.remove(ahead)
                return ahead
        return None


@dataclass(frozen=True, slots=True, eq=False)
class _Ahead:
    """One table's part of a pull."""

    want: Want
    pulled: Pulled
    place: int


@dataclass(frozen=True, slots=True)
class _Gathered:
    """Parts of several pulls."""

    parts: list[_Ahead]

    def rows(self) -> list[Rows]:
        """Wait and return the rows of each part."""
        return [part.pulled.rows()[part.place] for part in self.parts]


class HalfAsync(Mode):
    """Adds up the gradients of several own steps, sends the sum as one push and waits until it is applied."""

    def __init__(self, store: Store, *, steps: int) -> None:
        super().__init__(store)
        self._steps = steps
        self._held: list[Sequence[Change]] = []

    def push(self, changes: Sequence[Change], weight: float = 1.0, then: Sequence[Want] = ()) -> Pulled:
        """End an optimizer step; every `steps`-th sends the sum. See `Mode.push`."""
        self.step += 1
        self._held.append(changes)
        if len(self._held) >= self._steps:
            self.flush()
        return self.pull(then)

    def flush(self) -> None:
        """Send the steps held back, if any, and wait until they are applied."""
        if self._held:
            self._send(summed([change for changes in self._held for change in changes]))
            self._forget()
        self.store.flush()

    def _forget(self) -> None:
        self._held.clear()


def summed(changes: Sequence[Change]) -> list[Change]:
    """Return one change per table: gradients, counts, shows and clicks added up per id, at the last learning rate."""
    tables: dict[str, list[Change]] = {}
    for change in changes:
        tables.setdefault(change.table, []).append(change)
    return [_sum_of(of_table) for of_table in tables.values()]


def _sum_of(changes: list[Change]) -> Change:
    last = changes[-1]
    if len(changes) == 1:
        return last
    dim = last.values.shape[1]
    has_statistics = last.shows is not None or last.clicks is not None
    # Counts up to 2**24 are exact in float32.
    columns = [_columns(c, has_statistics) for c in changes]
    keys, total = merge([c.keys for c in changes], columns, [1.0] * len(changes))
    return Change(
        table=last.table,
        keys=keys,
        values=np.ascontiguousarray(total[:, :dim]),
        lr=last.lr,
        counts=total[:, dim].astype(np.uint32),
        shows=total[:, dim + 1].copy() if has_statistics else None,
        clicks=total[:, dim + 2].copy() if has_statistics else None,
    )


def _columns(change: Change, has_statistics: bool) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Return values, counts and (where the table keeps them) shows and clicks side by side, one line per id."""
    counts = np.ones(len(change.keys), np.float32) if change.counts is None else change.counts
    columns = [change.values, counts]
    if has_statistics:
        # What a table assumes when it is not told: every occurrence a show, none a click.
        columns += [counts if change.shows is None else change.shows]
        columns += [np.zeros(len(counts), np.float32) if change.clicks is None else change.clicks]
    return np.column_stack(columns).astype(np.float32, copy=False)
