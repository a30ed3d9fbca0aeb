"""Pushes of mode `sync` that wait for the rest of their step, and the step as one change per table."""

from __future__ import annotations

from operator import itemgetter

from phalanx.ps.server.log_entry import LogEntry
from phalanx.ps.stores.update import TableUpdate
from phalanx.ps.stores.update_sums import average_updates


class SyncStepBuffer:
    """What each worker pushed for the step under way. One thread at a time."""

    def __init__(self) -> None:
        self._by_worker: dict[int, LogEntry] = {}

    def hold(self, worker: int, entry: LogEntry) -> None:
        """Keep a copy of a worker's push."""
        self._by_worker[worker] = entry.copy()

    def updates_by_worker(self) -> list[tuple[int, LogEntry]]:
        """Return the workers whose pushes are held, in rank order, and the pushes."""
        return sorted(self._by_worker.items(), key=itemgetter(0))

    def take(self) -> list[TableUpdate]:
        """Return the step as changes to apply, and forget it."""
        parts = [(entry.meta["weight"], entry.updates) for _, entry in self.updates_by_worker()]
        self._by_worker.clear()
        return average_updates(parts)
