"""`FanOut`: pulls and pushes to all servers: one native call writes the frames of one, another takes the replies.

It borrows the links of the connections, and gives them back for all that is out of the ordinary: a control request, a
socket that is full, a server that waits or refuses, a link that broke. What is under way then becomes a `Pending` of
each connection, as if that had sent it. Over TLS and TCP each connection sends its part itself.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from phalanx.errors import PhalanxError
from phalanx.ps.stores.base import Rows
from phalanx.ps.stores.partition import PartitionedRequest, PullNumbers, ServerPart
from phalanx.ps.wire.client.connection import Connection
from phalanx.ps.wire.client.link import ServerLink
from phalanx.ps.wire.data_frame import DataReply, DataRequest, DataStatus
from phalanx.ps.wire.frame import Bytes, FrameKind
from phalanx.ps.wire.message import Pending
from phalanx.ps.wire.segments import SegmentLease
from phalanx.versions import HAS_NATIVE

if HAS_NATIVE:
    from phalanx import _core
    from phalanx.ps.stores.partition import NativeRequest

_LONGEST_WAIT_S = 5.0
_HOLD_S = 0.002
"""How long replies that came wait for those of other servers: nobody else reads their links meanwhile."""

_STATUSES = tuple(DataStatus)

_Unfinished = tuple[int, int, bytes, bool]
"""Server, errno, what was not written, whether any was; of a frame that is not out whole."""


class SentParts:
    """A pull or push that was sent to its servers.

    Args:
        request: What is asked.
        servers: The ranks of those that have a part in it, in ascending order.
        kind: `PULL` or `PUSH`.
        step: The worker's step.
        weight: Of a push.
        keep: Whether servers remember the keys of a pull for a push.
    """

    def __init__(
        self, request: PartitionedRequest, servers: Sequence[int], kind: FrameKind, step: int, weight: float, keep: bool
    ) -> None:
        self.request, self.servers = request, servers
        self.kind, self.step, self.weight, self.keep = kind, step, weight, keep
        self.sent_at = self.deadline = 0.0
        self.native: _core.SentRequest | None = None
        """The parts, and the replies to them; None where each connection sent its own."""

        self.pending: dict[int, Pending] = {}
        """Parts that a connection sent, or has under way in place of the fan-out, by server."""

    def is_done_by_all(self) -> bool:
        """Return whether every server has done what was asked, and `native` has all replies."""
        return self.native is not None and not self.pending and self.native.is_done_by_all()

    def merge(self, numbers: PullNumbers | None = None) -> list[Rows]:
        """Return the rows, one (n, dim) array per pull, where all have done what was asked.

        Args:
            numbers: Gets what each server calls the pull.
        """
        assert self.native is not None
        assert isinstance(self.request, NativeRequest)
        if numbers is not None:
            self.native.numbers(numbers)
        return self.request.merge_sent(self.native)

    def unanswered(self) -> list[int]:
        """Return the servers whose replies have not come."""
        if self.pending or self.native is None:
            return [server for server, pending in self.pending.items() if pending.outcome is None]
        return self.native.unanswered()

    def reply(self, server: int) -> DataReply:
        """Wait for the reply of a server after `FanOut.wait`; raises the error that came in its place."""
        if server in self.pending or self.native is None:
            reply: DataReply = self.pending[server].result()
            return reply
        status, number, dropped, rows = self.native.reply(server)
        return DataReply(_STATUSES[status], number, dropped, rows)

    def part(self, server: int) -> DataRequest:
        """Return the part of a server as its connection sends it."""
        return DataRequest(self.kind, ServerPart(self.request, server), self.step, self.weight, keep=self.keep)


class FanOut:
    """Sends pulls and pushes over the connections to all servers, for any number of threads.

    Args:
        connections: To each server, by rank.
        lock: The lock of all of them.
    """

    def __init__(self, connections: Sequence[Connection], lock: threading.RLock) -> None:
        self._connections, self._lock = list(connections), lock
        self._links: _core.LinkGroup | None = None
        """The links while they are borrowed."""

        self._sent: deque[SentParts] = deque()
        """What was sent over them and may have no answer yet."""

        self._reading: Sequence[int] = ()
        """Servers whose links a thread reads natively, also when these were given back meanwhile."""

        self.uses = 0

    @property
    def is_reading(self) -> bool:
        """See `Borrower`."""
        return bool(self._reading)

    def send(
        self,
        request: PartitionedRequest,
        servers: Sequence[int],
        kind: FrameKind,
        step: int,
        weight: float = 1.0,
        *,
        keep: bool = False,
    ) -> SentParts:
        """Send the parts of these servers; see `SentParts`.

        What cannot be sent has its error as its reply: the other parts are on their way.
        """
        sent = SentParts(request, servers, kind, step, weight, keep)
        unfinished: list[_Unfinished] = []
        try:
            with self._lock:
                is_sent = self._has_links() and self._send(sent, unfinished)
                if not is_sent:
                    self.give_back()
        finally:
            if unfinished:
                self._finish(sent, unfinished)
        if not is_sent:
            sent.pending = {server: _post(self._connections[server], sent.part(server)) for server in servers}
        return sent

    def wait(self, sent: SentParts) -> None:
        """Read replies of all servers at once; `SentParts.reply` then has them, and waits for those that are late."""
        while self._read(sent):
            pass

    def give_back(self) -> None:
        """Give the links back to their connections, with what is under way. Runs with the lock held."""
        links = self._links
        if links is None:
            return
        links.hand_over()
        unanswered: list[list[Pending]] = [[] for _ in self._connections]
        for sent in self._sent:
            assert sent.native is not None
            for server in sent.native.unanswered():
                unanswered[server].append(self._remember(sent, server))
        for server, connection in enumerate(self._connections):
            seq, start, end, has_answered = links.state(server)
            is_read = server in self._reading
            connection.get_back(seq, (start, end), unanswered[server], has_answered=has_answered, is_read=is_read)
        self._sent.clear()
        self._links = None

    def _has_links(self) -> bool:
        """Borrow the links unless they are; returns False if one of them is in use or lost."""
        if self._links is not None:
            return True
        if not HAS_NATIVE or self._reading:
            return False
        links = _core.LinkGroup()
        for connection in self._connections:
            lent = connection.lend()
            if lent is None:
                return False
            links.add(*lent)
        for connection in self._connections:
            connection.link.borrower = self
        self._links = links
        return True

    def _send(self, sent: SentParts, unfinished: list[_Unfinished]) -> bool:
        assert self._links is not None
        while self._sent and not self._sent[0].unanswered():
            self._sent.popleft()
        sent.native = _core.SentRequest(sent.request, sent.servers)
        sent.sent_at = time.monotonic()
        sent.deadline = sent.sent_at + self._connections[0].timeout_s
        self.uses += 1
        self._sent.append(sent)
        is_sent = self._send_frames(sent, sent.native, unfinished)
        if not is_sent:
            self._sent.pop()
            sent.native = None
        return is_sent

    def _send_frames(self, sent: SentParts, native: _core.SentRequest, unfinished: list[_Unfinished]) -> bool:
        assert self._links is not None
        terms = int(sent.kind), sent.step, sent.weight, sent.keep
        while True:
            lacking: list[tuple[int, int]] = []
            handed: list[SegmentLease] = []
            if self._links.send(native, sent.request, *terms, lacking, unfinished, handed):
                for lease in handed:
                    lease.segment.forget_descriptor()
                return True
            if not lacking or not self._lend_memory(lacking):
                return False

    def _lend_memory(self, lacking: Sequence[tuple[int, int]]) -> bool:
        assert self._links is not None
        for server, size in lacking:
            lease = self._connections[server].link.lease(size)
            if lease is None:
                return False
            segment = lease.segment
            descriptor = -1 if segment.descriptor is None else segment.descriptor
            self._links.lend_memory(server, lease.memory, segment.number, descriptor, lease)
        return True

    def _finish(self, sent: SentParts, unfinished: Sequence[_Unfinished]) -> None:
        """End the writing of frames, those that need no waiting first; one that was broken off costs its link."""
        left = deque(sorted(unfinished, key=lambda frame: len(frame[2])))
        try:
            with self._lock:
                self.give_back()
            while left:
                server, error, rest, _ = left.popleft()
                self._connections[server].finish(sent.pending[server], None if error else rest)
        finally:
            for server, *_ in left:
                self._connections[server].finish(None, None)

    def _remember(self, sent: SentParts, server: int) -> Pending:
        if (pending := sent.pending.get(server)) is None:
            assert sent.native is not None
            seq, size, memory, lease = sent.native.part(server)
            pending = self._connections[server].remember(sent.part(server))
            pending.resume(seq, memory[:size], lease, sent.sent_at, sent.deadline)
            sent.pending[server] = pending
        return pending

    def _deadline(self, sent: SentParts, servers: Sequence[int]) -> float:
        return min(sent.pending[server].deadline for server in servers) if sent.pending else sent.deadline

    def _read(self, sent: SentParts) -> bool:
        """Take replies until all came, or a frame is for Python, which then reads it; False if none can be taken."""
        servers: list[int] = []
        arrived: list[tuple[Any, ...]] = []
        try:
            with self._lock:
                servers = sent.unanswered()
                if not servers:
                    return False
                patience_s = self._deadline(sent, servers) - time.monotonic()
                if patience_s <= 0 or self._reading or not self._has_links():
                    self.give_back()
                    return False
                assert self._links is not None
                self.uses += 1
                links, self._reading = self._links, servers
            links.receive(servers, min(patience_s, _LONGEST_WAIT_S), _HOLD_S, arrived)
        finally:
            if self._reading is servers:
                self._end_reading(links, servers, arrived)
        return True

    def _end_reading(self, links: _core.LinkGroup, servers: list[int], arrived: Sequence[tuple[Any, ...]]) -> None:
        """Let others read; a link that was given back meanwhile, and whose reading is broken off here, is lost."""
        left = deque(servers)
        try:
            with self._lock:
                if arrived:
                    self.give_back()
                if self._links is links:
                    left.clear()
            self._end_turns(links, left, {server: fields for server, *fields in arrived})
        finally:
            self._reading = ()
            for server in left:
                self._connections[server].link.end_turn("reading its answer was interrupted")

    def _end_turns(self, links: _core.LinkGroup, left: deque[int], arrived: dict[int, list[Any]]) -> None:
        """End the reading of links that were given back, one after the other."""
        unread: ServerLink | None = None
        try:
            while left:
                link, fields = self._connections[left[0]].link, arrived.get(left[0], [None])
                _, *ahead, _ = links.state(left[0])
                link.channel.set_read_ahead(*ahead)
                if fields[0] == 0 and len(fields) == 1 and unread is None:
                    unread = link
                else:
                    link.end_turn(_take(link, fields))
                left.popleft()
            if unread is not None:
                # When nobody waits for another link any more. A second frame of that kind comes next.
                link, unread = unread, None
                link.read_next()
        finally:
            if unread is not None:
                unread.end_turn("reading its answer was interrupted")


def _post(connection: Connection, request: DataRequest) -> Pending:
    try:
        return connection.post(request)
    except PhalanxError as error:
        return connection.fail(request, error)


def _take(link: ServerLink, fields: Sequence[Any]) -> str | None:
    """Take what came over a link; returns why it can be read no more, if it cannot."""
    if len(fields) > 1:
        return link.settle_next(partial(_reply_of, fields))
    (error,) = fields
    return os.strerror(error) if isinstance(error, int) and error else error or None


def _reply_of(fields: Sequence[Any], pending: Pending) -> DataReply:
    status, number, dropped, at, rows = fields
    values: Bytes = np.frombuffer(bytearray(rows), np.uint8)
    if at >= 0 and status <= DataStatus.AGAIN and pending.reply_bytes:
        values = pending.reply_memory(at, pending.reply_bytes)
    return DataReply(_STATUSES[status], number, dropped, values)
