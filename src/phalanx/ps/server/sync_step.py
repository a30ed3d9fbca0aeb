"""Pushes of mode `sync` that wait for the rest of their step, and the step as one change per table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter

import numpy as np

from phalanx.ps.client.consistency import summed
from phalanx.ps.server.changes import unpack
from phalanx.ps.server.entry import Entry
from phalanx.ps.stores.base import Change


class Steps:
    """What each worker pushed for the step under way. One thread at a time."""

    def __init__(self) -> None:
        self._held: dict[int, Entry] = {}

    def hold(self, worker: int, entry: Entry) -> None:
        """Keep a copy of a worker's push."""
        self._held[worker] = entry.owned()

    def held(self) -> list[tuple[int, Entry]]:
        """Return the workers whose pushes are held, in rank order, and the pushes."""
        return sorted(self._held.items(), key=itemgetter(0))

    def take(self) -> list[Change]:
        """Return the step as changes to apply, and forget it."""
        parts = [(entry.meta["weight"], unpack(entry.meta, entry.arrays)) for _, entry in self.held()]
        self._held.clear()
        return averaged(parts)


def averaged(parts: Sequence[tuple[float, Sequence[Change]]]) -> list[Change]:
    """Return what several workers pushed as one change per table.

    Gradients are added in the order given, each times its weight over the sum of weights; then the rule applies once
    per id, at the learning rate of the last worker that named the table. Other kinds are applied as they are, first,
    in the order given.

    Args:
        parts: Weight and changes of each worker, in rank order.
    """
    total = sum(weight for weight, _ in parts)
    plain = [c for _, changes in parts for c in changes if c.kind != "gradient"]
    # A worker without rows of its own in this step must not even touch the state of a row, as a gradient of 0 would.
    scaled = [
        replace(c, values=c.values * np.float32(weight / total))
        for weight, changes in parts
        for c in changes
        if c.kind == "gradient" and weight > 0
    ]
    return plain + summed(scaled)
