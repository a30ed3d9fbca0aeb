"""`LogEntry`: one request in the write-ahead log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.ps.snapshot.records import Record
from phalanx.ps.stores.update import TableUpdate, unpack_updates

UNLOGGED = "unlogged"
"""Operation of an entry which says that tables now hold what the log does not; the next base does."""


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One checked request."""

    op: str
    client: int
    seq: int
    meta: Mapping[str, Any]
    """Of a push: `step` and `weight`."""

    updates: Sequence[TableUpdate] = ()
    """Of a push."""

    def record(self) -> dict[str, Any]:
        """Return the JSON object of the record of a request of control; the engine writes those of pushes."""
        return {"op": self.op, "client": self.client, "seq": self.seq, "meta": self.meta}

    @classmethod
    def of(cls, record: Record) -> LogEntry:
        """Return the entry in a record."""
        meta = dict(record.meta["meta"])
        updates = unpack_updates(meta.pop("changes", ()), record.arrays) if record.meta["op"] == "push" else ()
        return cls(record.meta["op"], record.meta["client"], record.meta["seq"], meta, updates)
