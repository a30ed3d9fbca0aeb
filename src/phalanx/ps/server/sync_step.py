"""Pushes of mode `sync` that wait for the rest of their step, and the step as one change per table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter

import numpy as np

from phalanx.ps.client.consistency import sum_updates
from phalanx.ps.server.changes import unpack
from phalanx.ps.server.entry import LogEntry
from phalanx.ps.stores.base import TableUpdate


class SyncStepBuffer:
    """What each worker pushed for the step under way. One thread at a time."""

    def __init__(self) -> None:
        self._by_worker: dict[int, LogEntry] = {}

    def hold(self, worker: int, entry: LogEntry) -> None:
        """Keep a copy of a worker's push."""
        self._by_worker[worker] = entry.owned()

    def updates_by_worker(self) -> list[tuple[int, LogEntry]]:
        """Return the workers whose pushes are held, in rank order, and the pushes."""
        return sorted(self._by_worker.items(), key=itemgetter(0))

    def take(self) -> list[TableUpdate]:
        """Return the step as changes to apply, and forget it."""
        parts = [(entry.meta["weight"], unpack(entry.meta, entry.arrays)) for _, entry in self.updates_by_worker()]
        self._by_worker.clear()
        return average_updates(parts)


def average_updates(parts: Sequence[tuple[float, Sequence[TableUpdate]]]) -> list[TableUpdate]:
    """Return what several workers pushed as one change per table.

    Gradients are added in the order given, each times its weight over the sum of weights; then the rule applies once
    per id, at the learning rate of the last worker that named the table. Other kinds are applied as they are, first,
    in the order given.

    Args:
        parts: Weight and changes of each worker, in rank order.
    """
    total = sum(weight for weight, _ in parts)
    plain = [c for _, updates in parts for c in updates if c.kind != "gradient"]
    # A worker without rows of its own in this step must not even touch the state of a row, as a gradient of 0 would.
    scaled = [
        replace(c, values=c.values * np.float32(weight / total))
        for weight, updates in parts
        for c in updates
        if c.kind == "gradient" and weight > 0
    ]
    return plain + sum_updates(scaled)
