"""`LogEntry`: one request in the write-ahead log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.ps.snapshot.records import Array, Record
from phalanx.ps.stores.update import TableUpdate, pack_updates, unpack_updates


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One checked request."""

    op: str
    client: int
    seq: int
    meta: Mapping[str, Any]
    """Of a push: `step` and `weight`."""

    updates: Sequence[TableUpdate] = ()
    """Of a push; unpacked once, when the request or the record is read."""

    def record(self) -> tuple[dict[str, Any], list[Array]]:
        """Return the JSON object and the arrays of its record."""
        meta, arrays = self.meta, list[Array]()
        if self.op == "push":
            described, arrays = pack_updates(self.updates)
            meta = {**self.meta, "changes": described}
        return {"op": self.op, "client": self.client, "seq": self.seq, "meta": meta}, arrays

    @classmethod
    def of(cls, record: Record) -> LogEntry:
        """Return the entry in a record."""
        meta = dict(record.meta["meta"])
        updates = unpack_updates(meta.pop("changes", ()), record.arrays) if record.meta["op"] == "push" else ()
        return cls(record.meta["op"], record.meta["client"], record.meta["seq"], meta, updates)

    def copy(self) -> LogEntry:
        """Return the entry with arrays of its own, to be kept after its request is answered."""
        return replace(self, updates=[update.copy() for update in self.updates])
