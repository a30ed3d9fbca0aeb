"""A request that changes something, as it lies in the log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from phalanx.ps.snapshot.records import Array, Record


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One checked request."""

    op: str
    client: int
    seq: int
    meta: Mapping[str, Any]
    arrays: list[Array]

    def record(self) -> dict[str, Any]:
        """Return the JSON object of its record."""
        return {"op": self.op, "client": self.client, "seq": self.seq, "meta": self.meta}

    @classmethod
    def of(cls, record: Record) -> LogEntry:
        """Return the entry in a record."""
        meta = record.meta
        return cls(meta["op"], meta["client"], meta["seq"], meta["meta"], record.arrays)

    def owned(self) -> LogEntry:
        """Return the entry with arrays of its own, to be kept after its request is answered."""
        return replace(self, arrays=[array.copy() for array in self.arrays])
