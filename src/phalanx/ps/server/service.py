"""`Service`: the request handler of a parameter server, without sockets.

A request that changes something is checked, written to the log, applied and answered, in this order and one at a time;
a restart applies the log by the same code. Each such request has a number of its client, and each push also the number
of its worker's step: whichever comes again is answered and not applied.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from phalanx.errors import BackendError, ClosedError, ConfigError, InternalError, PhalanxError, did_you_mean
from phalanx.ps.server.clients import ClientState
from phalanx.ps.server.clocks import Clocks
from phalanx.ps.server.log import Log
from phalanx.ps.server.log_entry import LogEntry
from phalanx.ps.server.state import OPS, ServerState
from phalanx.ps.server.write_freeze import WriteFreeze
from phalanx.ps.snapshot.save import LEFT
from phalanx.ps.stores.base import Keys, Rows
from phalanx.ps.stores.tables import get_table
from phalanx.ps.stores.update import unpack_updates
from phalanx.ps.wire.message import RpcReply, RpcRequest

logger = logging.getLogger("phalanx.ps")


class Service:
    """Answers requests; any number of threads may call `handle`.

    Args:
        server: This server's number.
        servers: How many there are.
    """

    def __init__(self, server: int = 0, servers: int = 1) -> None:
        self.state = ServerState(server, servers)
        self.write_freeze = WriteFreeze()
        self.log: Log | None = None
        self.stopped = threading.Event()
        self.failure: PhalanxError | None = None
        """Why the server cannot go on, once `stopped` is set for that."""

        self.write_base: Callable[[], None] = lambda: None
        """Writes a base snapshot and returns when it is there."""

        self._connections: Counter[int] = Counter()
        self._connections_lock = threading.Lock()
        self._answers: dict[str, Callable[[RpcRequest], RpcReply]] = {
            **dict.fromkeys(OPS, self._change),
            "pull": self._pull,
            "push": self._push,
            "report": self._report,
        }

    def handle(self, request: RpcRequest) -> RpcReply:
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
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as e:
            if isinstance(e, PhalanxError):
                raise
            raise ConfigError(f"The request {request.op!r} is malformed: {e!r}. Send what the protocol says.") from e

    def add_operation(self, op: str, answer: Callable[[RpcRequest], RpcReply]) -> None:
        """Answer one more operation."""
        self._answers[op] = answer

    # --- connections -------------------------------------------------------------------------------------------------

    def connected(self, client: int) -> None:
        """Note that a connection of a client opened."""
        with self._connections_lock:
            self._connections[client] += 1
            if (state := self.state.clients.get(client)) and self.state.clocks:
                self.state.clocks.connect(state.worker)

    def disconnected(self, client: int) -> None:
        """Note that a connection of a client closed. A client that connects again may do so before this is seen."""
        with self._connections_lock:
            self._connections -= Counter({client: 1})
            if (state := self.state.clients.get(client)) and self.state.clocks and client not in self._connections:
                self.state.clocks.disconnect(state.worker, time.monotonic())

    @property
    def is_connected(self) -> bool:
        """Whether any client has a connection."""
        with self._connections_lock:
            return bool(self._connections)

    # --- reading -----------------------------------------------------------------------------------------------------

    def _pull(self, request: RpcRequest) -> RpcReply:
        client, clocks = self._client(request)
        step = request.meta["step"]
        if step > clocks.next_step(client.worker):
            # Its own push is not here: refused, or its keys were asked for again. Waiting would block that push.
            return RpcReply({"need_push": clocks.next_step(client.worker)})
        clocks.wait(step, request.report_wait)
        names = [name for name, _ in request.meta["tables"]]
        rows = self._rows(request, names, request.arrays)
        if not request.meta.get("keep") or len(set(names)) < len(names):
            return RpcReply({}, rows)
        number = self.state.clients.next_pull()
        client.remember(number, {name: keys.copy() for name, keys in zip(names, request.arrays, strict=True)})
        return RpcReply({"pull_id": number}, rows)

    def _rows(self, request: RpcRequest, names: Sequence[str], keys: Sequence[Keys]) -> list[Rows]:
        """Return the rows of the keys of each table, in the client's memory if that has room."""
        empty = request.reply_buffer.empty
        return [self.state.tables.pull(name, of_table, empty) for name, of_table in zip(names, keys, strict=True)]

    def _report(self, request: RpcRequest) -> RpcReply:
        clocks = self.state.clocks
        return RpcReply(
            {
                "tables": self.state.tables.report(),
                "mode": clocks.mode if clocks else None,
                "steps": clocks.steps if clocks else [],
                "live": sorted(clocks.live) if clocks else [],
                "log_bytes": self.log.bytes if self.log else 0,
            }
        )

    # --- changing ----------------------------------------------------------------------------------------------------

    def _push(self, request: RpcRequest) -> RpcReply:
        """Take a push, and read what is asked with it as a pull of the next step would."""
        names = [name for name, _ in request.meta.get("then", ())]
        for name in names:
            get_table(self.state.tables.specs, name)
        pushed = len(request.arrays) - len(names)
        reply = self._take(replace(request, arrays=request.arrays[:pushed]))
        if not names or "need_keys" in reply.meta:
            return reply
        self.state.require_clocks().wait(request.meta["step"] + 1, request.report_wait)
        return RpcReply(reply.meta, self._rows(request, names, request.arrays[pushed:]))

    def _take(self, request: RpcRequest) -> RpcReply:
        client, clocks = self._client(request)
        step = request.meta["step"]
        clocks.check()
        if step <= clocks.next_step(client.worker):
            clocks.wait_turn(step, request.report_wait)
        with self.write_freeze.change(client.worker, step):
            # Once more: the worker may have been started again since, and this be the request of its older process.
            client, clocks = self._client(request)
            reply = self._earlier_reply(client, request.seq)
            next_step = clocks.next_step(client.worker)
            if reply is None and step < next_step:
                reply = {"again": True}
            if reply is None:
                reply = self._take_new(request, client, next_step)
            position = self.log.position if self.log else 0
        return self._durable(reply, position)

    def _take_new(self, request: RpcRequest, client: ClientState, next_step: int) -> dict[str, Any]:
        meta = request.meta
        if meta["step"] > next_step and not client.owes_keys:
            raise ConfigError(
                f"Worker {client.worker} pushes step {meta['step']}, but its step {next_step} did not come. Push each "
                "step once, in order; after an error push that step again."
            )
        if meta["step"] > next_step or not client.remembers(meta["changes"]):
            client.owes_keys = True
            return {"need_keys": True}
        updates = unpack_updates(meta["changes"], request.arrays, client.pulled_keys)
        about = {"step": meta["step"], "weight": float(meta.get("weight", 1.0))}
        reply = self._accept(LogEntry("push", request.client, request.seq, about, updates))
        client.owes_keys = False
        client.forget(meta["changes"])
        return reply

    def _change(self, request: RpcRequest) -> RpcReply:
        client = self._find_client(request)
        leaving = LEFT - 1 if request.op == "leave" else LEFT
        with self.write_freeze.change(client.worker if client else -1, leaving):
            client = self._find_client(request)
            reply = self._earlier_reply(client, request.seq) if client else None
            if reply is None:
                reply = self._accept(LogEntry(request.op, request.client, request.seq, request.meta))
            position = self.log.position if self.log else 0
        if request.op == "declare":
            self._mark_connected(request.client)
        self.write_unlogged()
        return self._durable(reply, position)

    def write_unlogged(self) -> None:
        """Write a base snapshot if tables hold what the log does not say."""
        if self.state.unlogged:
            self.write_base()
            self.state.unlogged = False

    def _earlier_reply(self, client: ClientState, seq: int) -> dict[str, Any] | None:
        """Return the answer to a request that was done before, None for a new one."""
        if seq > client.last:
            return None
        return client.reply if seq == client.last else {"again": True}

    def _accept(self, entry: LogEntry) -> dict[str, Any]:
        if self.stopped.is_set():
            raise ClosedError("This server is stopping. Start the job again to go on.")
        self.state.check(entry)
        if self.log is not None:
            self.log.append(*entry.record())
        try:
            return self.state.apply(entry)
        except Exception as e:
            raise self._failed(
                InternalError(f"A checked {entry.op!r} failed: {e!r}. This server stops; please report it.")
            ) from e

    def _durable(self, reply: dict[str, Any], position: int) -> RpcReply:
        try:
            if self.log is not None:
                self.log.sync(position)
        except BackendError as e:
            raise self._failed(e) from None
        return RpcReply(reply)

    def _failed(self, error: PhalanxError) -> PhalanxError:
        self.failure = self.failure or error
        self.stopped.set()
        return error

    # --- inside ------------------------------------------------------------------------------------------------------

    def _find_client(self, request: RpcRequest) -> ClientState | None:
        """Return who asks; None for a process that declares its first tables."""
        clients = self.state.clients
        return clients.get(request.client) if request.op == "declare" else clients[request.client]

    def _mark_connected(self, client: int) -> None:
        """Note that a worker whose connection was there before it was known is here."""
        with self._connections_lock:
            if client in self._connections and self.state.clocks:
                self.state.clocks.connect(self.state.clients[client].worker)

    def _client(self, request: RpcRequest) -> tuple[ClientState, Clocks]:
        return self.state.clients[request.client], self.state.require_clocks()
