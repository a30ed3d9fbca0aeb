"""What a server answers. A plain object: requests go in, replies come out; no sockets.

A request that changes something is checked, written to the log, applied and answered, in this order and one at a time;
a restart applies the log by the same code. Each such request has a number of its client, and each push also the number
of its worker's step: whichever comes again is answered and not applied.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from pydantic import ValidationError

from phalanx.errors import ClosedError, ConfigError, InternalError, PhalanxError, did_you_mean
from phalanx.ps.local import check_same
from phalanx.ps.placement import shards_owned
from phalanx.ps.rules import TableSpec, table_spec
from phalanx.ps.server import changes
from phalanx.ps.server.clients import Client, Clients
from phalanx.ps.server.clocks import Clocks, checked_worker
from phalanx.ps.server.entry import Entry
from phalanx.ps.server.gate import Gate
from phalanx.ps.server.leases import Leases
from phalanx.ps.server.log import Log
from phalanx.ps.server.steps import Steps
from phalanx.ps.server.tables import Tables
from phalanx.ps.snapshot.read import Source
from phalanx.ps.snapshot.save import LEFT
from phalanx.ps.table import Table, make_table
from phalanx.ps.wire.message import Reply, Request

logger = logging.getLogger("phalanx.ps")


class Service:
    """Answers requests; any number of threads may call `handle`.

    Args:
        server: This server's number.
        servers: How many there are.
    """

    def __init__(self, server: int = 0, servers: int = 1) -> None:
        self.server, self.servers = server, servers
        self.shards = shards_owned(server, servers)
        self.tables = Tables()
        self.clients = Clients()
        self.clocks: Clocks | None = None
        self.leases = Leases()
        self.gate = Gate()
        self.log: Log | None = None
        self.stopped = threading.Event()
        self.sources: list[Source] = []
        """Snapshots that fill tables as they are declared; a later one goes first."""

        self.loaded: Callable[[Source, str], None] = lambda source, table: None
        """Called when a table was filled."""

        self.unlogged = False
        """Whether tables were filled by what the log does not hold, so that a base snapshot has to."""

        self.write_base: Callable[[], None] = lambda: None
        """Writes a base snapshot and returns when it is there."""

        self._prepared: dict[str, Table] = {}
        self._steps = Steps()
        self._open: Counter[int] = Counter()
        self._opening = threading.Lock()
        self._answers: dict[str, Callable[[Request], Reply]] = {
            "pull": self._pull,
            "push": self._push,
            "report": self._report,
            "stop": self._stop,
        }
        self._applies: dict[str, Callable[[Entry], dict[str, Any]]] = {
            "declare": self._declare,
            "push": self._apply_push,
            "leave": self._leave,
            "shrink": self._shrink,
            "lease": self._lease,
            "done": self._done,
        }
        self._checks: dict[str, Callable[[Request], None]] = {
            "declare": self._check_declare,
            "shrink": self._check_shrink,
            "lease": self._check_lease,
            "done": self._check_done,
        }
        self._answers.update(dict.fromkeys(("declare", "leave", "shrink", "lease", "done"), self._change))

    def handle(self, request: Request) -> Reply:
        """Answer one request; may wait as long as the mode says.

        Raises:
            PhalanxError: If it cannot be done; nothing is changed then.
        """
        answer = self._answers.get(request.op)
        if answer is None:
            raise ConfigError(
                f"A server has no operation {request.op!r}.{did_you_mean(request.op, self._answers)} "
                "Run the same version of phalanx everywhere."
            )
        try:
            return answer(request)
        except (KeyError, TypeError, ValueError) as e:
            if isinstance(e, PhalanxError):
                raise
            raise ConfigError(f"The request {request.op!r} is malformed: {e!r}. Send what the protocol says.") from e

    def offer(self, op: str, answer: Callable[[Request], Reply]) -> None:
        """Answer one more operation."""
        self._answers[op] = answer

    # --- connections -------------------------------------------------------------------------------------------------

    def connected(self, client: int) -> None:
        """Note that a connection of a client opened."""
        with self._opening:
            self._open[client] += 1
            if (known := self.clients.get(client)) and self.clocks:
                self.clocks.connect(known.worker)

    def disconnected(self, client: int) -> None:
        """Note that a connection of a client closed. A client that connects again may do so before this is seen."""
        with self._opening:
            self._open[client] -= 1
            if (known := self.clients.get(client)) and self.clocks and self._open[client] <= 0:
                self.clocks.disconnect(known.worker, time.monotonic())

    # --- reading -----------------------------------------------------------------------------------------------------

    def _pull(self, request: Request) -> Reply:
        client, clocks = self._client(request)
        step = request.meta["step"]
        if step > clocks.next_step(client.worker):
            # Its own push is not here: refused, or its keys were asked for again. Waiting would block that push.
            return Reply({"need_push": clocks.next_step(client.worker)})
        clocks.wait(step)
        names = [name for name, _ in request.meta["tables"]]
        rows = []
        for name, keys in zip(names, request.arrays, strict=True):
            spec = self.tables.specs.get(name)
            if spec is None:
                raise changes.unknown_table(name, self.tables.specs)
            rows.append(request.room.empty((len(keys), spec.dim), np.float32))
            self.tables.pull(name, keys, rows[-1])
        if not request.meta.get("keep") or len(set(names)) < len(names):
            return Reply({}, rows)
        number = self.clients.next_pull()
        client.keep(number, {name: keys.copy() for name, keys in zip(names, request.arrays, strict=True)})
        return Reply({"pull_id": number}, rows)

    def _report(self, request: Request) -> Reply:
        clocks = self.clocks
        return Reply(
            {
                "tables": self.tables.report(),
                "mode": clocks.mode if clocks else None,
                "steps": clocks.steps if clocks else [],
                "live": sorted(clocks.live) if clocks else [],
                "log_bytes": self.log.bytes if self.log else 0,
            }
        )

    def _stop(self, request: Request) -> Reply:
        self.stopped.set()
        return Reply()

    # --- changing ----------------------------------------------------------------------------------------------------

    def _push(self, request: Request) -> Reply:
        client, clocks = self._client(request)
        step = request.meta["step"]
        clocks.check()
        if step <= clocks.next_step(client.worker):
            clocks.wait_turn(step)
        with self.gate.change(client.worker, step):
            reply = self._again(client, request.seq)
            due = clocks.next_step(client.worker)
            if reply is None and step < due:
                reply = {"again": True}
            if reply is None:
                reply = self._take_push(request, client, due)
            position = self.log.position if self.log else 0
        return self._durable(reply, position)

    def _take_push(self, request: Request, client: Client, due: int) -> dict[str, Any]:
        meta, pull = request.meta, request.meta.get("pull_id")
        kept = None if pull is None else client.kept.get(pull)
        if meta["step"] > due and not client.owes_keys:
            raise ConfigError(
                f"Worker {client.worker} pushes step {meta['step']}, but its step {due} did not come. Push each step "
                "once, in order; after an error push that step again."
            )
        if meta["step"] > due or (pull is not None and kept is None):
            client.owes_keys = True
            return {"need_keys": True}
        pushed = changes.unpack(meta, request.arrays, kept)
        weight = float(meta.get("weight", 1.0))
        changes.check(pushed, weight, self.tables.specs)
        described, arrays = changes.pack(pushed)
        body = {"step": meta["step"], "weight": weight, "changes": described}
        reply = self._accept(Entry("push", request.client, request.seq, body, arrays))
        client.owes_keys = False
        client.kept.pop(pull, None)  # type: ignore[arg-type]
        return reply

    def _change(self, request: Request) -> Reply:
        known = self.clients[request.client] if request.op != "declare" else self.clients.get(request.client)
        leaving = LEFT - 1 if request.op == "leave" else LEFT
        with self.gate.change(known.worker if known else -1, leaving):
            reply = self._again(known, request.seq) if known else None
            if reply is None:
                if check := self._checks.get(request.op):
                    check(request)
                reply = self._accept(Entry(request.op, request.client, request.seq, request.meta, request.arrays))
            position = self.log.position if self.log else 0
        self.write_unlogged()
        return self._durable(reply, position)

    def write_unlogged(self) -> None:
        """Write a base snapshot if tables hold what the log does not say."""
        if self.unlogged:
            self.write_base()
            self.unlogged = False

    def _again(self, client: Client, seq: int) -> dict[str, Any] | None:
        """Return the answer to a request that was done before, None for a new one."""
        if seq > client.last:
            return None
        return client.reply if seq == client.last else {"again": True}

    def _accept(self, entry: Entry) -> dict[str, Any]:
        if self.stopped.is_set():
            raise ClosedError("This server is stopping. Start the job again to go on.")
        if self.log is not None:
            self.log.append(entry.record(), entry.arrays)
        try:
            return self.apply(entry)
        except Exception as e:
            self.stopped.set()
            raise InternalError(f"A checked {entry.op!r} failed: {e!r}. This server stops; please report it.") from e

    def _durable(self, reply: dict[str, Any], position: int) -> Reply:
        if self.log is not None:
            self.log.sync(position)
        return Reply(reply)

    def apply(self, entry: Entry) -> dict[str, Any]:
        """Do what an entry says, as it comes or from the log, and return the answer."""
        reply = self._applies[entry.op](entry)
        client = self.clients[entry.client]
        client.last, client.reply = max(client.last, entry.seq), reply
        return reply

    # --- operations --------------------------------------------------------------------------------------------------

    def _check_declare(self, request: Request) -> None:
        meta = request.meta
        if meta["mode"] not in ("sync", "async", "bounded"):
            raise ConfigError(f"Asked servers for mode {meta['mode']!r}; modes: sync, async, bounded.")
        checked_worker(meta["worker"], meta["workers"])
        if self.clocks is not None:
            for field in ("mode", "bound", "workers"):
                have, want = getattr(self.clocks, field), meta.get(field) or (0 if field == "bound" else None)
                if have != want:
                    raise ConfigError(
                        f"Worker {meta['worker']} asks for {field}={want!r}, but this job's servers run with "
                        f"{field}={have!r}, as the first worker asked. Give every worker the same strategy."
                    )
        for spec in map(_spec, meta["specs"]):
            if spec.name in self.tables.specs:
                check_same(self.tables.specs[spec.name], spec)
            else:
                self._prepared[spec.name] = self.build(spec)

    def _declare(self, entry: Entry) -> dict[str, Any]:
        meta = entry.meta
        if self.clocks is None:
            self.clocks = Clocks(meta["mode"], meta["workers"], meta.get("bound") or 0)
            logger.info("server %d: mode %s, %d workers", self.server, meta["mode"], meta["workers"])
        client, replaced = self.clients.of(entry.client, meta["worker"])
        if replaced:
            self.leases.release(client.worker)
        self.clocks.join(client.worker)
        for spec in map(_spec, meta["specs"]):
            if spec.name not in self.tables.specs:
                self.tables.put(self._prepared.pop(spec.name) if spec.name in self._prepared else self.build(spec))
                self._note_source(spec.name)
                logger.info("server %d: table %s, dim %d, %s", self.server, spec.name, spec.dim, spec.rule)
        return {"tables": sorted(self.tables.specs), "step": self.clocks.next_step(client.worker)}

    def build(self, spec: TableSpec) -> Table:
        """Return a new table, filled by the latest source that has it.

        Raises:
            ConfigError: If it cannot be made, or does not fit that source's table.
            DataError: If that source is broken; names file and offset.
        """
        table = make_table(spec)
        if source := self._source_of(spec.name):
            source.fill(table, self.shards)
        return table

    def _source_of(self, name: str) -> Source | None:
        return next((source for source in reversed(self.sources) if name in source.names), None)

    def _note_source(self, name: str) -> None:
        if source := self._source_of(name):
            self.loaded(source, name)
            self.unlogged = True

    def _apply_push(self, entry: Entry) -> dict[str, Any]:
        worker, clocks = self.clients[entry.client].worker, self._clocks()
        if entry.meta["step"] < clocks.next_step(worker):
            return {}  # written again at the head of a segment, beside the first time
        if clocks.mode == "sync":
            self._steps.hold(worker, entry)
            clocks.push(worker)
            return {"dropped": self._complete(clocks)}
        dropped = sum(self.tables.apply(change) for change in changes.unpack(entry.meta, entry.arrays))
        clocks.push(worker)
        return {"dropped": dropped}

    def _complete(self, clocks: Clocks) -> int:
        """Apply the step that every live worker has pushed, if there is one."""
        dropped = 0
        while clocks.complete > clocks.version:
            dropped += sum(self.tables.apply(change) for change in self._steps.take())
            clocks.apply(clocks.version + 1)
        return dropped

    def _leave(self, entry: Entry) -> dict[str, Any]:
        worker, clocks = self.clients[entry.client].worker, self._clocks()
        clocks.leave(worker)
        self.leases.release(worker)
        if clocks.mode == "sync":
            self._complete(clocks)
        return {}

    def _check_shrink(self, request: Request) -> None:
        if request.meta["table"] not in self.tables.specs:
            raise changes.unknown_table(request.meta["table"], self.tables.specs)

    def _shrink(self, entry: Entry) -> dict[str, Any]:
        return {"rows": self.tables.shrink(entry.meta["table"])}

    def _check_lease(self, request: Request) -> None:
        self.leases.check(request.meta["epoch"], request.meta["files"])

    def _lease(self, entry: Entry) -> dict[str, Any]:
        worker = self.clients[entry.client].worker
        return self.leases.lease(worker, entry.meta["epoch"], entry.meta["files"])

    def _check_done(self, request: Request) -> None:
        worker = self.clients[request.client].worker
        self.leases.check_done(worker, request.meta["epoch"], request.meta["file"])

    def _done(self, entry: Entry) -> dict[str, Any]:
        meta = entry.meta
        self.leases.done(meta["epoch"], meta["file"], meta["offset"], end=meta.get("end", True))
        return {}

    # --- recovery ----------------------------------------------------------------------------------------------------

    def pending(self) -> list[Entry]:
        """Return the pushes of a step that is not complete; they are in no table yet."""
        return self._steps.entries()

    def state(self) -> dict[str, Any]:
        """Return what is not in the tables."""
        return {
            "specs": [spec.to_json() for spec in self.tables.specs.values()],
            "counts": self.tables.counts(),
            "clients": self.clients.to_json(),
            "clocks": self.clocks.to_json() if self.clocks else None,
            "leases": self.leases.to_json(),
        }

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned; puts empty tables."""
        for spec in state["specs"]:
            self.tables.put(make_table(_spec(spec)))
        self.tables.count_from(state["counts"])
        self.clients.restore(state["clients"])
        self.clocks = Clocks.from_json(state["clocks"]) if state["clocks"] else None
        self.leases.restore(state["leases"], holders=True)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _client(self, request: Request) -> tuple[Client, Clocks]:
        return self.clients[request.client], self._clocks()

    def _clocks(self) -> Clocks:
        if self.clocks is None:
            raise ConfigError("This server holds no tables yet. Declare them first.")
        return self.clocks


def _spec(value: object) -> TableSpec:
    try:
        return table_spec(value)
    except ValidationError as e:
        raise ConfigError(f"A declared table is malformed: {e}") from e
