"""`ServerState`: tables, clocks, clients and leases of a server, and the operations that change them.

Nothing here waits, locks, writes or answers. One thread at a time changes it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from pydantic import ValidationError

from phalanx.errors import ConfigError
from phalanx.ps.server.clients import ClientStates
from phalanx.ps.server.clocks import Clocks, check_worker
from phalanx.ps.server.log_entry import LogEntry
from phalanx.ps.snapshot.read import SnapshotSource
from phalanx.ps.stores.base import ServerMode
from phalanx.ps.stores.leases import Leases
from phalanx.ps.stores.tables import TableSet, get_table
from phalanx.ps.stores.update_sums import average_updates
from phalanx.ps.table.placement import shards_owned
from phalanx.ps.table.rules import TableSpec, check_same_spec, table_spec
from phalanx.ps.table.table import RowTable, make_table

logger = logging.getLogger("phalanx.ps")


class ServerState:
    """Tables, clocks, clients and leases of one server.

    Args:
        server: This server's number.
        servers: How many there are.
    """

    def __init__(self, server: int = 0, servers: int = 1) -> None:
        self.server = server
        self.shards = shards_owned(server, servers)
        self.tables = TableSet()
        self.clients = ClientStates()
        self.clocks: Clocks | None = None
        self.leases = Leases()
        self.sources: list[SnapshotSource] = []
        """Snapshots that fill tables as they are declared; a later one goes first."""

        self.loaded: Callable[[SnapshotSource, str], None] = lambda source, table: None
        """Called when a table was filled."""

        self.unlogged = False
        """Whether tables were filled by what the log does not hold, so that a base snapshot has to."""

        self._prepared: dict[str, RowTable] = {}
        self._sync_step: dict[int, LogEntry] = {}
        """Pushes of mode `sync`, by worker, that wait for the rest of their step."""

    def check(self, entry: LogEntry) -> None:
        """Check that an entry can be applied; after that it does not fail.

        Raises:
            ConfigError: If it cannot; gives the reason.
            DataError: If it declares a table that a broken snapshot is to fill.
        """
        OPS[entry.op].check(self, entry)

    def apply(self, entry: LogEntry) -> dict[str, Any]:
        """Apply a checked entry, new or from the log, and return the answer."""
        reply = OPS[entry.op].apply(self, entry)
        client = self.clients[entry.client]
        if entry.seq > client.last:
            client.last, client.reply = entry.seq, reply
        return reply

    def require_clocks(self) -> Clocks:
        """Return the clocks.

        Raises:
            ConfigError: If no worker has declared tables.
        """
        if self.clocks is None:
            raise ConfigError("This server holds no tables yet. Declare them first.")
        return self.clocks

    def make_table(self, spec: TableSpec) -> RowTable:
        """Return a new table, filled by the latest source that has it.

        Raises:
            ConfigError: If it cannot be made, or does not fit that source's table.
            DataError: If that source is broken; names file and offset.
        """
        source = self._source_of(spec.name)
        return source.table(spec, self.shards) if source else make_table(spec)

    # --- to and from files -------------------------------------------------------------------------------------------

    def pending(self) -> list[LogEntry]:
        """Return the pushes of a step that is not complete; they are in no table yet.

        Each is its worker's, whose process may be another by now, and has no number: that request was answered.
        """
        return [
            replace(entry, client=self.clients.newest(worker), seq=0)
            for worker, entry in sorted(self._sync_step.items())
        ]

    def to_json(self) -> dict[str, Any]:
        """Return what is not in the tables."""
        return {
            "specs": [spec.to_json() for spec in self.tables.specs.values()],
            "counts": self.tables.counts(),
            "clients": self.clients.to_json(),
            "clocks": self.clocks.to_json() if self.clocks else None,
            "leases": self.leases.to_json(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `to_json` returned; puts empty tables."""
        for spec in state["specs"]:
            self.tables.add(make_table(_spec(spec)))
        self.tables.count_from(state["counts"])
        self.clients.restore(state["clients"])
        self.clocks = Clocks.from_json(state["clocks"]) if state["clocks"] else None
        self.leases.restore(state["leases"], holders=True)

    # --- operations --------------------------------------------------------------------------------------------------

    def _check_declare(self, entry: LogEntry) -> None:
        meta = entry.meta
        if meta["mode"] not in (*get_args(ServerMode), None):
            raise ConfigError(f"Asked servers for mode {meta['mode']!r}; modes: {', '.join(get_args(ServerMode))}.")
        check_worker(meta["worker"], meta["workers"])
        if self.clocks is not None:
            is_either_open = meta["mode"] is None or self.clocks.mode is None
            for field in ("workers",) if is_either_open else ("mode", "bound", "workers"):
                actual, expected = getattr(self.clocks, field), meta.get(field) or (0 if field == "bound" else None)
                if actual != expected:
                    raise ConfigError(
                        f"Worker {meta['worker']} asks for {field}={expected!r}, but this job's servers run with "
                        f"{field}={actual!r}, as the first worker asked. Give every worker the same strategy."
                    )
        for spec in map(_spec, meta["specs"]):
            if spec.name in self.tables.specs:
                check_same_spec(self.tables.specs[spec.name], spec)
            else:
                self._prepared[spec.name] = self.make_table(spec)

    def _declare(self, entry: LogEntry) -> dict[str, Any]:
        meta = entry.meta
        if self.clocks is None:
            self.clocks = Clocks(None, meta["workers"])
        if self.clocks.mode is None and meta["mode"] is not None:
            self.clocks.set_mode(meta["mode"], meta.get("bound") or 0)
            logger.info("server %d: mode %s, %d workers", self.server, meta["mode"], meta["workers"])
        client, replaced = self.clients.of(entry.client, meta["worker"])
        if replaced:
            self.leases.release(client.worker)
        self.clocks.join(client.worker)
        for spec in map(_spec, meta["specs"]):
            if spec.name not in self.tables.specs:
                self.tables.add(self._prepared.pop(spec.name) if spec.name in self._prepared else self.make_table(spec))
                self._note_source(spec.name)
                logger.info("server %d: table %s, dim %d, %s", self.server, spec.name, spec.dim, spec.rule)
        return {"tables": sorted(self.tables.specs), "step": self.clocks.next_step(client.worker)}

    def _check_push(self, entry: LogEntry) -> None:
        weight = entry.meta["weight"]
        if not 0 <= weight < math.inf:
            raise ConfigError(f"Asked for a push of weight {weight}. Its weight is the rows of its batch: at least 0.")
        for update in entry.updates:
            self.tables.check(update)

    def _push(self, entry: LogEntry) -> dict[str, Any]:
        worker, clocks = self.clients[entry.client].worker, self.require_clocks()
        if entry.meta["step"] < clocks.next_step(worker):
            return {}  # written again at the head of a segment, beside the first time
        if clocks.mode == "sync":
            self._sync_step[worker] = entry.copy()
            clocks.push(worker)
            return {"dropped": self._complete(clocks)}
        dropped = sum(self.tables.apply(update) for update in entry.updates)
        clocks.push(worker)
        return {"dropped": dropped}

    def _complete(self, clocks: Clocks) -> int:
        """Apply the step that every live worker has pushed, if there is one."""
        dropped = 0
        while clocks.complete > clocks.version:
            parts = [(entry.meta["weight"], entry.updates) for _, entry in sorted(self._sync_step.items())]
            self._sync_step.clear()
            dropped += sum(self.tables.apply(update) for update in average_updates(parts))
            clocks.apply(clocks.version + 1)
        return dropped

    def _leave(self, entry: LogEntry) -> dict[str, Any]:
        worker, clocks = self.clients[entry.client].worker, self.require_clocks()
        clocks.leave(worker)
        self.leases.release(worker)
        if clocks.mode == "sync":
            self._complete(clocks)
        return {}

    def _check_shrink(self, entry: LogEntry) -> None:
        get_table(self.tables.specs, entry.meta["table"])

    def _shrink(self, entry: LogEntry) -> dict[str, Any]:
        return {"rows": self.tables.shrink(entry.meta["table"])}

    def _check_lease(self, entry: LogEntry) -> None:
        self.leases.check(entry.meta["epoch"], entry.meta["files"])

    def _lease(self, entry: LogEntry) -> dict[str, Any]:
        worker = self.clients[entry.client].worker
        return self.leases.lease(worker, entry.meta["epoch"], entry.meta["files"])

    def _check_progress(self, entry: LogEntry) -> None:
        worker = self.clients[entry.client].worker
        self.leases.check_progress(worker, entry.meta["epoch"], entry.meta["file"], entry.meta["offset"])

    def _progress(self, entry: LogEntry) -> dict[str, Any]:
        meta = entry.meta
        self.leases.record_progress(meta["epoch"], meta["file"], meta["offset"], end=meta.get("end", True))
        return {}

    def _source_of(self, name: str) -> SnapshotSource | None:
        return next((source for source in reversed(self.sources) if name in source.names), None)

    def _note_source(self, name: str) -> None:
        if source := self._source_of(name):
            self.loaded(source, name)
            self.unlogged = True


@dataclass(frozen=True, slots=True)
class Operation:
    """What a request that changes the state does."""

    apply: Callable[[ServerState, LogEntry], dict[str, Any]]
    """Does a checked entry and returns the answer; must not fail."""

    check: Callable[[ServerState, LogEntry], None] = lambda state, entry: None
    """Raises where an entry cannot be applied; runs before the entry is logged, and not when the log is replayed."""


OPS = {
    "declare": Operation(ServerState._declare, ServerState._check_declare),
    "push": Operation(ServerState._push, ServerState._check_push),
    "leave": Operation(ServerState._leave),
    "shrink": Operation(ServerState._shrink, ServerState._check_shrink),
    "lease": Operation(ServerState._lease, ServerState._check_lease),
    "done": Operation(ServerState._progress, ServerState._check_progress),
}
"""Every request that is logged, by its name on the wire."""


def _spec(value: object) -> TableSpec:
    try:
        return table_spec(value)
    except ValidationError as e:
        raise ConfigError(f"A declared table is malformed: {e}") from e
