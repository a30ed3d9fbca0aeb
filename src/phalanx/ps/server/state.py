"""`ServerState`: tables, clocks, clients and leases of a server, and the operations of control that change them.

Nothing here waits, locks, writes or answers. One thread at a time changes it, while no push is under way: those are the
engine's, which shares the tables and clocks.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from pydantic import ValidationError

from phalanx._core import ServerEngine
from phalanx.errors import ConfigError
from phalanx.ps.server.clients import ClientStates
from phalanx.ps.server.clocks import Clocks, check_worker
from phalanx.ps.server.log import UNLOGGED, LogEntry
from phalanx.ps.snapshot.read import SnapshotSource
from phalanx.ps.snapshot.records import Array
from phalanx.ps.stores.base import Keys, ServerMode
from phalanx.ps.stores.batch_leases import BatchLeases, LeasedBatch, is_count
from phalanx.ps.stores.leases import Leases
from phalanx.ps.stores.tables import TableSet, get_table
from phalanx.ps.stores.update import COLUMNS, KINDS, TableUpdate
from phalanx.ps.table.native import NativeTable
from phalanx.ps.table.placement import shards_owned, table_salt
from phalanx.ps.table.rules import TableSpec, check_same_spec, table_spec
from phalanx.ps.table.table import RowTable, make_table
from phalanx.ps.wire.progress import WorkProgress

logger = logging.getLogger("phalanx.ps")


class ServerState:
    """Tables, clocks, clients and leases of one server.

    Args:
        engine: Takes the pulls and pushes.
        server: This server's number.
        servers: How many there are.
    """

    def __init__(self, engine: ServerEngine, server: int = 0, servers: int = 1) -> None:
        self.engine = engine
        self.server, self.servers = server, servers
        self.shards = shards_owned(server, servers)
        self.tables = TableSet()
        self.clients = ClientStates(engine)
        self.clocks: Clocks | None = None
        self.leases = Leases()
        self.batch_leases = BatchLeases()
        self.sources: list[SnapshotSource] = []
        """Snapshots that fill tables as they are declared; a later one goes first."""

        self.loaded: Callable[[SnapshotSource, str], None] = lambda source, table: None
        """Called when a table was filled."""

        self.unlogged = False
        """Whether tables were filled by what the log does not hold, so that a base snapshot has to."""

        self.progress = WorkProgress("loads")
        """How far tables are filled at the moment."""

        self._prepared: dict[str, RowTable] = {}
        self._days = 0
        """Days of tables that were ended; on all servers the same, but while one is."""

        self._first_pushes: dict[int, int] = {}
        """By worker that was started again: the number of the first push of its newest process."""

    def check(self, entry: LogEntry) -> None:
        """Check that an entry can be applied; after that it does not fail.

        Raises:
            BackendError: If it ends a day of a table whose files take no rows.
            ConfigError: If it cannot; gives the reason.
            DataError: If it declares a table that a broken snapshot is to fill.
        """
        OPS[entry.op].check(self, entry)

    def apply(self, entry: LogEntry) -> dict[str, Any]:
        """Apply a checked entry, new or from the log, and return the answer."""
        if entry.op == UNLOGGED:
            self.unlogged = True
            return {}
        reply = OPS[entry.op].apply(self, entry)
        self.engine.record_reply(entry.client, entry.seq, json.dumps(reply))
        return reply

    def fills_table(self, entry: LogEntry) -> bool:
        """Whether a checked entry makes a table with rows of a snapshot, which the log does not hold."""
        names = [spec["name"] for spec in entry.meta["specs"]] if entry.op == "declare" else []
        return any(name not in self.tables.specs and self._source_of(name) for name in names)

    def put_table(self, table: RowTable) -> None:
        """Add a table, in place of the one of its name if there is one."""
        assert isinstance(table, NativeTable)
        name, rule = table.spec.name, table.spec.rule
        dividing = type(rule).__name__ if rule.divides_by_lr else ""
        self.engine.put_table(table_salt(name), name, json.dumps(name), dividing, table)
        self.tables.add(table)

    def prepare(self, entry: LogEntry) -> None:
        """Check a declaration and fill its tables, which takes long and holds up no push; `apply` puts them in place.

        Raises:
            ConfigError: If it cannot be applied; gives the reason.
            DataError: If a snapshot that is to fill a table is broken.
        """
        self._prepared = {}
        self._check_declare(entry)

    def read_tables(self, source: SnapshotSource, specs: Sequence[TableSpec]) -> list[RowTable]:
        """Return tables with the rows of a snapshot, to be put in place together.

        Raises:
            ConfigError: If the snapshot has no such table, or one of another dim.
            DataError: If it is broken.
        """
        return [source.table(spec, self.shards, self.progress) for spec in specs]

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
        return source.table(spec, self.shards, self.progress) if source else make_table(spec)

    # --- to and from files -------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return what is not in the tables."""
        return {
            "specs": [spec.to_json() for spec in self.tables.specs.values()],
            "counts": self.tables.counts(),
            "clients": self.clients.to_json(),
            "clocks": self.clocks.to_json() if self.clocks else None,
            "leases": self.leases.to_json(),
            "batch_leases": self.batch_leases.to_json(),
            "days": self._days,
            "first_pushes": {str(worker): push for worker, push in self._first_pushes.items()},
            "withheld": self.engine.withheld(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `to_json` returned; puts empty tables."""
        for spec in state["specs"]:
            self.put_table(make_table(_spec(spec)))
        self.tables.count_from(state["counts"])
        self.clients.restore(state["clients"])
        if state["clocks"]:
            clocks = self._put_clocks(Clocks.from_json(state["clocks"]))
            for client in state["clients"]:
                check_worker(client["worker"], clocks.workers)
        self.leases.restore(state["leases"], holders=True)
        # None of these is in a state of an earlier version.
        if leases := state.get("batch_leases"):
            self.batch_leases.restore(leases)
        self._days = state.get("days", 0)
        self._first_pushes = {int(worker): push for worker, push in state.get("first_pushes", {}).items()}
        for worker in state.get("withheld", ()):
            self.engine.restore_withheld(worker)

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
            elif spec.name not in self._prepared:
                self._prepared[spec.name] = self.make_table(spec)

    def _declare(self, entry: LogEntry) -> dict[str, Any]:
        meta = entry.meta
        clocks = self.clocks or self._put_clocks(Clocks(None, meta["workers"]))
        if clocks.mode is None and meta["mode"] is not None:
            clocks.set_mode(meta["mode"], meta.get("bound") or 0)
            logger.info("server %d: mode %s, %d workers", self.server, meta["mode"], meta["workers"])
        is_another = self.engine.admit(entry.client, meta["worker"])
        if is_another:
            self.engine.settle(
                meta["worker"], 0
            )  # of a process that was fenced in an attempt that ended before `leave`
            self._release(meta["worker"], clocks)
        worker = self.clients.worker_of(entry.client)
        clocks.join(worker)
        if is_another:
            self._first_pushes[worker] = clocks.next_step(worker)
        for spec in map(_spec, meta["specs"]):
            if spec.name not in self.tables.specs:
                self.put_table(self._prepared.pop(spec.name) if spec.name in self._prepared else self.make_table(spec))
                self._note_source(spec.name)
                logger.info("server %d: table %s, dim %d, %s", self.server, spec.name, spec.dim, spec.rule)
        return {"tables": sorted(self.tables.specs), "step": clocks.next_step(worker)}

    def _replay_push(self, entry: LogEntry) -> dict[str, Any]:
        updates = engine_updates(self.tables, entry.updates)
        self.engine.replay(entry.client, entry.seq, entry.meta["step"], entry.meta["weight"], updates)
        return {}  # the engine has recorded what was answered

    def _check_fence(self, entry: LogEntry) -> None:
        check_worker(entry.meta["worker"], self.clocks.workers if self.clocks else entry.meta["workers"])

    def _fence(self, entry: LogEntry) -> dict[str, Any]:
        """Let the caller speak for a lost worker: what its process still has on its way is refused from now on."""
        worker = entry.meta["worker"]
        if self.clocks is None:
            self._put_clocks(Clocks(None, entry.meta["workers"]))
        self.engine.admit(entry.client, worker)
        return {"pushes": self.engine.withhold(worker), "first": self._first_pushes.get(worker, 0)}

    def _check_leave(self, entry: LogEntry) -> None:
        if "pushes" in entry.meta:
            _check_counts(entry.meta["pushes"])

    def _leave(self, entry: LogEntry) -> dict[str, Any]:
        worker, clocks = self.clients.worker_of(entry.client), self.require_clocks()
        if "pushes" in entry.meta:
            self.engine.settle(worker, entry.meta["pushes"])
        clocks.leave(worker)
        self._release(worker, clocks)
        self.engine.complete_steps()
        return {"pushes": clocks.next_step(worker)}

    def _release(self, worker: int, clocks: Clocks) -> None:
        """Let others have the files and batches of a worker that left, or whose process is another now."""
        self.leases.release(worker)
        if undone := self.batch_leases.release(worker, clocks.next_step(worker)):
            listed = ", ".join(f"{batch.number} of epoch {batch.epoch}" for batch in undone)
            logger.info("batches that worker %d leased and did not push go to others: %s", worker, listed)

    def _check_shrink(self, entry: LogEntry) -> None:
        get_table(self.tables.tables, entry.meta["table"]).require_room_to_shrink()

    def _shrink(self, entry: LogEntry) -> dict[str, Any]:
        self._days += 1
        return {"rows": self.tables.shrink(entry.meta["table"])}

    def _check_lease(self, entry: LogEntry) -> None:
        self.leases.check(entry.meta["epoch"], entry.meta["files"])

    def _lease(self, entry: LogEntry) -> dict[str, Any]:
        worker = self.clients.worker_of(entry.client)
        return self.leases.lease(worker, entry.meta["epoch"], entry.meta["files"])

    def _check_progress(self, entry: LogEntry) -> None:
        worker = self.clients.worker_of(entry.client)
        self.leases.check_progress(worker, entry.meta["epoch"], entry.meta["file"], entry.meta["offset"])

    def _progress(self, entry: LogEntry) -> dict[str, Any]:
        meta = entry.meta
        self.leases.record_progress(meta["epoch"], meta["file"], meta["offset"], end=meta.get("end", True))
        return {}

    def _check_lease_batches(self, entry: LogEntry) -> None:
        meta = entry.meta
        self.batch_leases.check(meta["loader"], meta["epoch"], meta["total"], meta["count"])
        if meta["push"] is not None:
            _check_counts(meta["push"])

    def _lease_batches(self, entry: LogEntry) -> dict[str, Any]:
        meta, worker = entry.meta, self.clients.worker_of(entry.client)
        pushed = self.require_clocks().next_step(worker)
        return self.batch_leases.lease(
            worker, meta["loader"], meta["epoch"], meta["total"], meta["count"], pushed=pushed, push=meta["push"]
        )

    def _check_begin(self, entry: LogEntry) -> None:
        _check_counts(*(entry.meta[name] for name in ("loader", "epoch", "number", "push")))

    def _begin(self, entry: LogEntry) -> dict[str, Any]:
        meta, worker = entry.meta, self.clients.worker_of(entry.client)
        self.batch_leases.begin(worker, LeasedBatch(meta["loader"], meta["epoch"], meta["number"]), meta["push"])
        return {}

    def _put_clocks(self, clocks: Clocks) -> Clocks:
        self.clocks = clocks
        self.engine.set_clocks(clocks)
        return clocks

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
    "push": Operation(ServerState._replay_push),
    "fence": Operation(ServerState._fence, ServerState._check_fence),
    "leave": Operation(ServerState._leave, ServerState._check_leave),
    "shrink": Operation(ServerState._shrink, ServerState._check_shrink),
    "lease": Operation(ServerState._lease, ServerState._check_lease),
    "done": Operation(ServerState._progress, ServerState._check_progress),
    "lease_batches": Operation(ServerState._lease_batches, ServerState._check_lease_batches),
    "begin": Operation(ServerState._begin, ServerState._check_begin),
}
"""Every request that is logged, by its name on the wire. A push comes here from the log alone."""


def _check_counts(*numbers: object) -> None:
    for number in numbers:
        if not is_count(number):
            raise ConfigError(f"A worker sent {number!r} as a count. Run the same version everywhere.")


def _spec(value: object) -> TableSpec:
    try:
        return table_spec(value)
    except ValidationError as e:
        raise ConfigError(f"A declared table is malformed: {e}") from e


EngineUpdate = tuple[int, int, Keys, Array, float | None, Array | None, Array | None, Array | None]
"""Salt, kind, keys, values, rate and `COLUMNS`."""


def engine_updates(tables: TableSet, updates: Sequence[TableUpdate]) -> list[EngineUpdate]:
    """Return updates as the engine takes them.

    Raises:
        ConfigError: If there is no such table, or an update does not fit it.
    """
    for update in updates:
        tables.check(update)
    return [_pack(update) for update in updates]


def _pack(update: TableUpdate) -> EngineUpdate:
    columns = [getattr(update, name) for name in COLUMNS]
    counts, shows, clicks = (None if column is None else np.ascontiguousarray(column) for column in columns)
    lr = None if update.lr is None else float(update.lr)
    return table_salt(update.table), KINDS.index(update.kind), update.keys, update.values, lr, counts, shows, clicks
