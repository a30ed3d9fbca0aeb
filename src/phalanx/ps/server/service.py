"""`Service`: the request handler of a parameter server, without sockets.

Pulls and pushes are the engine's (`csrc/server_engine.h`), which works on all cores. The other requests are control:
each that changes something is checked, written to the log, applied and answered, in this order, while nothing else
changes; a restart applies the log by the same code. Each such request has a number of its client: one that comes again
is answered and not applied.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from phalanx._core import ServerEngine
from phalanx.errors import (
    BackendError,
    ClosedError,
    ConfigError,
    DataError,
    InternalError,
    PhalanxError,
    did_you_mean,
)
from phalanx.ps.server.load_turn import LoadTurn
from phalanx.ps.server.log import UNLOGGED, Log, LogEntry
from phalanx.ps.server.state import OPS, ServerState
from phalanx.ps.server.write_freeze import WriteFreeze
from phalanx.ps.snapshot.moment import LEFT
from phalanx.ps.wire.message import RpcReply, RpcRequest

logger = logging.getLogger("phalanx.ps")


class Service:
    """Answers requests; any number of threads may call `handle`.

    Args:
        server: This server's number.
        servers: How many there are.
        clock: Seconds of a clock that never goes back; ends freezes.
    """

    def __init__(self, server: int = 0, servers: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self.stopped = stopped = threading.Event()
        self._failures = failures = list[PhalanxError]()

        # No method, and no error with a traceback: the engine would keep this service, which keeps the engine.
        def failed(error: PhalanxError) -> None:
            failures.append(type(error)(*error.args))
            stopped.set()

        self._set_failure = failed
        self.write_freeze = WriteFreeze(clock)
        self.engine = ServerEngine(self.write_freeze, failed)
        self.state = ServerState(self.engine, server, servers)
        self.load_turn = LoadTurn(self.state)
        self._log: Log | None = None
        self.write_base: Callable[[], None] = lambda: None
        """Writes a base snapshot and returns when it is there."""

        self._budget = 0
        self._connections: Counter[int] = Counter()
        self._served: Counter[int] = Counter()
        """Requests in answer, by client: pulls and pushes do not come here."""

        self._unanswered = 0

        self._connections_lock = threading.Lock()
        self._answers: dict[str, Callable[[RpcRequest], RpcReply]] = {
            **dict.fromkeys(OPS, self._change),
            "declare": self._declare,
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
        with self._connections_lock:
            self._served[request.client] += 1
        try:
            return answer(request)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as e:
            if isinstance(e, PhalanxError):
                raise
            raise ConfigError(f"The request {request.op!r} is malformed: {e!r}. Send what the protocol says.") from e
        finally:
            with self._connections_lock:
                self._served -= Counter({request.client: 1})

    @property
    def served_workers(self) -> set[int]:
        """Workers that wait for this server themselves, such as one that saves."""
        with self._connections_lock:
            clients = list(self._served)
        return {worker for client in clients if (worker := self.engine.worker_of(client)) is not None}

    @property
    def unanswered(self) -> int:
        """Changes that are done and not answered yet; pulls and pushes do not count."""
        with self._connections_lock:
            return self._unanswered

    @property
    def failure(self) -> PhalanxError | None:
        """Why the server cannot continue, once `stopped` is set for that."""
        first = next(iter(self._failures), None)
        return None if first is None else type(first)(*first.args)

    @property
    def log(self) -> Log | None:
        """Where changes are written before they are applied, if anywhere."""
        return self._log

    @log.setter
    def log(self, log: Log) -> None:
        self._log = log
        self.engine.set_log(log.native)

    @property
    def budget(self) -> int:
        """Bytes that all tables may take together; pushes that need more are refused. 0 without a limit."""
        return self._budget

    @budget.setter
    def budget(self, size: int) -> None:
        self._budget = size
        self.engine.set_budget(size)

    def fail(self, error: PhalanxError) -> PhalanxError:
        """Say that the server cannot continue, refuse new changes, and return the error."""
        self._set_failure(error)
        self.engine.stop()
        return error

    def stop(self) -> None:
        """Refuse new changes and end every wait."""
        self.stopped.set()
        self.engine.stop()
        if self.state.clocks is not None:
            self.state.clocks.stop()

    def add_operation(self, op: str, answer: Callable[[RpcRequest], RpcReply]) -> None:
        """Answer one more operation."""
        self._answers[op] = answer

    # --- connections -------------------------------------------------------------------------------------------------

    def connected(self, client: int) -> None:
        """Note that a connection of a client opened."""
        with self._connections_lock:
            self._connections[client] += 1
            self._mark_connected(client)

    def disconnected(self, client: int) -> None:
        """Note that a connection of a client closed. A client that connects again may do so before this is seen."""
        with self._connections_lock:
            self._connections -= Counter({client: 1})
            worker = self.engine.worker_of(client)
            if worker is not None and self.state.clocks and client not in self._connections:
                self.state.clocks.disconnect(worker, time.monotonic())

    @property
    def is_connected(self) -> bool:
        """Whether any client has a connection."""
        with self._connections_lock:
            return bool(self._connections)

    # --- control -----------------------------------------------------------------------------------------------------

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

    def _declare(self, request: RpcRequest) -> RpcReply:
        with self.load_turn.take(request):
            self.state.prepare(_entry_of(request))
            return self._change(request)

    def _change(self, request: RpcRequest) -> RpcReply:
        worker = self._find_worker(request)
        leaving = LEFT - 1 if request.op == "leave" else LEFT
        token = request.meta.get("token") if request.op == "fence" else None
        gate, number = self.write_freeze, -1 if worker is None else worker
        with gate.while_frozen(token) if token else gate.change(number, leaving, request.report_wait):
            earlier = None
            if self._find_worker(request) is not None:
                earlier = self.engine.earlier_reply(request.client, request.seq)
            reply = self._accept(_entry_of(request)) if earlier is None else json.loads(earlier)
            position = self.log.position if self.log else 0
            with self._connections_lock:
                self._unanswered += 1
        try:
            if request.op == "declare":
                with self._connections_lock:
                    # Its connection may have been there before it was known.
                    if request.client in self._connections:
                        self._mark_connected(request.client)
            self.write_unlogged(request)
            return self._durable(reply, position)
        finally:
            with self._connections_lock:
                self._unanswered -= 1

    def mark_unlogged(self) -> None:
        """Say in the log that tables hold what it does not, within the change that fills them.

        Who follows the log continues from the base that `write_unlogged` writes.
        """
        self.state.unlogged = True
        if self.log is not None:
            self.log.append(LogEntry(UNLOGGED, 0, 0, {}).record(), [])

    def write_unlogged(self, request: RpcRequest) -> None:
        """Write a base snapshot if tables hold what the log does not say; the client is told how far that is."""
        if not self.state.unlogged:
            return
        with self.load_turn.take(request):
            self.write_owed_base()

    def write_owed_base(self) -> None:
        """Do so if no client is there to be told. What is filled while it is written owes another base."""
        if not self.state.unlogged:
            return
        self.state.unlogged = False
        try:
            self.write_base()
        except BaseException:
            self.state.unlogged = True
            raise

    def _accept(self, entry: LogEntry) -> dict[str, Any]:
        if self.stopped.is_set():
            raise ClosedError("This server is stopping. Start the job again to continue.")
        self.state.check(entry)
        if self.state.fills_table(entry):
            self.mark_unlogged()
        if self.log is not None:
            self.log.append(entry.record(), [])
        try:
            return self.state.apply(entry)
        except (BackendError, DataError) as e:
            raise self.fail(e) from None  # a table's file takes or gives no rows
        except Exception as e:
            raise self.fail(
                InternalError(f"A checked {entry.op!r} failed: {e!r}. This server stops; please report it.")
            ) from e

    def _durable(self, reply: dict[str, Any], position: int) -> RpcReply:
        try:
            if self.log is not None:
                self.log.sync(position)
        except BackendError as e:
            raise self.fail(e) from None
        return RpcReply(reply)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _find_worker(self, request: RpcRequest) -> int | None:
        """Return who asks; None for a process that declares its first tables, or begins to speak for a lost worker."""
        if request.op in ("declare", "fence"):
            return self.engine.worker_of(request.client)
        return self.state.clients.worker_of(request.client)

    def _mark_connected(self, client: int) -> None:
        worker = self.engine.worker_of(client)
        if worker is not None and self.state.clocks:
            self.state.clocks.connect(worker)


def _entry_of(request: RpcRequest) -> LogEntry:
    return LogEntry(request.op, request.client, request.seq, request.meta)
