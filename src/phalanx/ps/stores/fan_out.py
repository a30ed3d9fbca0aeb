"""`FanOut`: a pull or push to several servers: one native call writes the frames of all, another takes the replies.

Each connection sends its part itself where anything is out of the ordinary: over TLS and TCP, while a link is written
to or has requests of Python under way, where shared memory or room lacks. A frame other than a reply is read by Python,
which takes over what is under way on that link.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from phalanx.errors import PhalanxError
from phalanx.ps.stores.base import Rows
from phalanx.ps.stores.partition import PartitionedRequest, PullNumbers, ServerPart
from phalanx.ps.wire.client.connection import Connection
from phalanx.ps.wire.data_frame import DataReply, DataRequest, DataStatus
from phalanx.ps.wire.frame import FrameKind
from phalanx.ps.wire.message import Pending
from phalanx.versions import HAS_NATIVE

if HAS_NATIVE:
    from phalanx import _core
    from phalanx.ps.stores.partition import NativeRequest

_LONGEST_WAIT_S = 5.0
_HOLD_S = 0.002
"""How long replies that came wait for those of other servers: nobody else reads their links meanwhile."""

_STATUSES = tuple(DataStatus)


class FanOut:
    """A pull or push to several servers.

    Args:
        connections: To each server, by rank; they share a lock.
        request: What is asked.
        servers: The ranks of those that have a part in it, in ascending order.
        kind: `PULL` or `PUSH`.
        step: The worker's step.
        weight: Of a push.
        keep: Whether servers remember the keys of a pull for a push.
    """

    def __init__(
        self,
        connections: Sequence[Connection],
        request: PartitionedRequest,
        servers: Sequence[int],
        kind: FrameKind,
        step: int,
        *,
        weight: float = 1.0,
        keep: bool = False,
    ) -> None:
        self.connections, self.request, self.servers = list(connections), request, servers
        self._lock = self.connections[0].lock
        self._kind, self._step, self._weight, self._keep = kind, step, weight, keep
        self._sent_at = self._deadline = 0.0
        self._native: _core.SentRequest | None = None
        """The parts, and the replies to them; None where each connection sent its own."""

        self._pending: dict[int, Pending] = {}
        """Parts that a connection sent, or took over from native code, by server."""

    def send(self) -> None:
        """Send all parts. What cannot be sent has its error as its reply: the other parts are on their way."""
        if not self.servers:
            return
        if not (HAS_NATIVE and self._send_native()):
            # A connection that is written to may have to be waited for.
            for server in sorted(self.servers, key=lambda rank: self.connections[rank].is_written):
                self._pending[server] = _post(self.connections[server], self.part(server))

    def wait(self) -> None:
        """Read replies of all servers at once; `reply` then has them, and waits for those that are late."""
        while self._native is not None and self._read(self._native):
            pass

    def is_done_by_all(self) -> bool:
        """Return whether every server has done what was asked, and `rows` can be called."""
        return self._native is not None and self._native.is_done_by_all()

    def rows(self, numbers: PullNumbers | None = None) -> list[Rows]:
        """Return the rows, one (n, dim) array per pull, where all have done what was asked.

        Args:
            numbers: Gets what each server calls the pull.
        """
        assert self._native is not None
        assert isinstance(self.request, NativeRequest)
        if numbers is not None:
            self._native.numbers(numbers)
        return self.request.merge_sent(self._native)

    def reply(self, server: int) -> DataReply | None:
        """Wait for the reply of a server; None if its part was not sent.

        Raises:
            PhalanxError: The error that came in its place.
        """
        if (reply := self._native_reply(server)) is not None:
            return reply
        self.connections[server].take_over()
        if (pending := self._pending.get(server)) is None:
            return self._native_reply(server)  # which another thread may have read meanwhile
        answer: DataReply = pending.result()
        return answer

    def _native_reply(self, server: int) -> DataReply | None:
        if self._native is None or (fields := self._native.reply(server)) is None:
            return None
        status, number, dropped, rows = fields
        return DataReply(_STATUSES[status], number, dropped, rows)

    def part(self, server: int) -> DataRequest:
        """Return the part of a server as its connection sends it."""
        return DataRequest(self._kind, ServerPart(self.request, server), self._step, self._weight, keep=self._keep)

    def pending_part(self, server: int) -> Pending:
        """Return a part that native code has under way as its connection knows it. See `PartsUnderWay`."""
        if (pending := self._pending.get(server)) is None:
            assert self._native is not None
            pending = self.connections[server].remember(self.part(server))
            pending.resume(*self._native.part(server), self._sent_at, self._deadline)
            self._pending[server] = pending
        return pending

    def _send_native(self) -> bool:
        unfinished = _core.UnfinishedFrames()
        try:
            with self._lock:
                is_sent = self._send_frames(unfinished)
            while (frame := unfinished.first()) is not None:
                self._finish(*frame)
                unfinished.release_first()
        finally:
            unfinished.drop()
        return is_sent

    def _send_frames(self, unfinished: _core.UnfinishedFrames) -> bool:
        if not all(self.connections[server].takes_native for server in self.servers):
            return False
        terms = int(self._kind), self._step, self._weight, self._keep
        native = _core.SentRequest(self.request, self.servers)
        self._sent_at = time.monotonic()
        self._deadline = self._sent_at + self.connections[0].timeout_s
        while True:
            lacking: list[tuple[int, int]] = []
            self._native = native
            if _core.send_parts(native, self, self.request, self._links(), *terms, lacking, unfinished):
                return True
            self._native = None
            if not lacking or not self._lend_memory(lacking):
                return False

    def _lend_memory(self, lacking: Sequence[tuple[int, int]]) -> bool:
        for server, size in lacking:
            link = self.connections[server].link
            if (lease := link.lease(size)) is None:
                return False
            link.state.lend_memory(lease.memory, lease)
        return True

    def _finish(self, server: int, error: int, rest: bytes) -> None:
        connection = self.connections[server]
        connection.take_over()
        connection.finish(self._pending.get(server), None if error else rest)

    def _links(self) -> list[_core.ClientLink]:
        return [connection.link.state for connection in self.connections]

    def _read(self, native: _core.SentRequest) -> bool:
        """Take a reply of each server, or let Python read another frame; returns whether there is more to take."""
        patience_s = max(0.0, self._deadline - time.monotonic())
        waited: list[int] = []
        for_python: list[int] = []
        reading = _core.Reading()
        try:
            with self._lock:
                if not reading.begin(native, self._links()):
                    return False
            reading.receive(min(patience_s, _LONGEST_WAIT_S), _HOLD_S)
            with self._lock:
                reading.end(waited, for_python)
                for server in waited:
                    self.connections[server].link.notify()
        finally:
            reading.drop()
        if for_python:
            # The next call comes to the others, if they have such a frame, too.
            self.connections[for_python[0]].link.read_next()
        return patience_s > 0 and not native.is_done_by_all()


def _post(connection: Connection, request: DataRequest) -> Pending:
    try:
        return connection.post(request)
    except PhalanxError as error:
        return connection.fail(request, error)
