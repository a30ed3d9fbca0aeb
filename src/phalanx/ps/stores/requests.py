"""`PullRequest` and `SentPush`: send pulls and pushes to servers, wait for replies, retry.

Where the job has another number of servers meanwhile, a pull or push is cut anew and goes to those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from phalanx.errors import InternalError
from phalanx.ps.stores.base import Keys, PullSpec, Rows
from phalanx.ps.stores.fan_out import FanOut
from phalanx.ps.stores.partition import PartitionedRequest, PullNumbers, ServerPart
from phalanx.ps.stores.update import TableUpdate
from phalanx.ps.wire.client.connection import Connection, ServersMovedError
from phalanx.ps.wire.data_frame import DataReply, DataRequest, DataStatus
from phalanx.ps.wire.frame import Bytes, FrameKind


@dataclass(frozen=True, slots=True, eq=False)
class NamedPull:
    """What a push needs to name an earlier pull."""

    keys: dict[str, Keys]
    """By table."""

    numbers: PullNumbers
    """What each server calls the pull; known once the rows are."""

    def has_keys_of(self, update: TableUpdate) -> bool:
        """Return whether a change can name this pull."""
        keys = self.keys.get(update.table)
        return (
            keys is not None and (keys is update.keys or np.array_equal(keys, update.keys)) and bool(self.numbers.any())
        )


class PullRequest:
    """A pull under way on several servers.

    Args:
        request: What is asked.
        keys: Of each table, for a push that names this pull.
        keep: Whether a push can name it: a server remembers one set of keys per table.
        before: Called before the rows are read; the answers to earlier pushes have come when those to this pull have,
            and an error among them comes first.
    """

    def __init__(
        self, request: PartitionedRequest, keys: dict[str, Keys], before: Callable[[], None], *, keep: bool
    ) -> None:
        self._request, self._before, self._keep = request, before, keep
        self._sent: FanOut | None = None
        self._rows: list[Rows] | None = None
        self.named = NamedPull(keys, np.zeros(request.servers, np.uint64))

    def send(self, connections: Sequence[Connection], step: int) -> None:
        """Ask every server that owns some of the keys."""
        servers = self._request.read_servers()
        self._sent = FanOut(connections, self._request, servers, FrameKind.PULL, step, keep=self._keep)
        self._sent.send()

    def rows(self) -> list[Rows]:
        """Wait and return one (n, dim) array per `PullSpec`."""
        if self._rows is None:
            assert self._sent is not None
            sent = self._sent
            self._before()
            sent.wait()
            if sent.is_done_by_all():
                self._rows = sent.rows(self.named.numbers)
            else:
                self._rows = self._request.merge({rank: self._answer(sent, rank) for rank in sent.servers})
            self._sent = None
        return self._rows

    def _answer(self, sent: FanOut, rank: int) -> Bytes:
        reply = sent.reply(rank)
        if reply is not None and reply.status == DataStatus.NEED_PUSH:
            # A push before this pull had to be sent again, and came behind it.
            reply = sent.connections[rank].post(sent.part(rank)).result()
        assert reply is not None
        if reply.status > DataStatus.AGAIN:
            raise InternalError(f"Server {rank} answered a pull with {reply.status.name}, not with rows. Report it.")
        self.named.numbers[rank] = reply.number
        return reply.rows


class PushRequest:
    """A push under way on one server.

    Args:
        connection: To the server.
        part: Its updates, and rows to read once these are in place.
        step: Number of the push.
        weight: Rows of the batch.
        result: Where it was sent: waits for the reply to it, and returns or raises that.
    """

    def __init__(
        self,
        connection: Connection,
        part: ServerPart,
        step: int,
        weight: float,
        result: Callable[[], DataReply | None] | None = None,
    ) -> None:
        self._connection, self._part, self._step, self._weight = connection, part, step, weight
        self._result = result
        self.rows: Bytes | None = None
        """The rows that were asked with it, once they came."""

    def send(self) -> None:
        """Send the push."""
        self._result = self._connection.post(DataRequest(FrameKind.PUSH, self._part, self._step, self._weight)).result

    def wait(self) -> None:
        """Wait until it is acknowledged; sends it again if it was refused before, or its pull is forgotten."""
        result, self._result = self._result, None
        if result is None:
            self._part = ServerPart(self._part.request, self._part.server, with_keys=True)
            self.send()
            self.wait()
            return
        reply = result()
        if reply is None or reply.status == DataStatus.NEED_KEYS:
            self.wait()
        elif self._part.counts[1]:
            self.rows = reply.rows


class SentPush:
    """A push under way on all servers.

    Args:
        updates: Its changes.
        step: Number of the push.
        weight: Rows of the batch.
        then: What to read once it is in place.
    """

    def __init__(self, updates: Sequence[TableUpdate], step: int, weight: float, then: Sequence[PullSpec]) -> None:
        self.updates, self.then = updates, then
        self._step, self._weight = step, weight
        self._sent: FanOut | None = None
        self._parts: list[PushRequest] | None = None
        self._unanswered: list[PushRequest] = []

    def send(self, request: PartitionedRequest, connections: Sequence[Connection]) -> None:
        """Send it, cut for these servers. Each takes it once, however often it is sent."""
        servers = range(request.servers)
        self._parts = None
        self._sent = FanOut(connections, request, servers, FrameKind.PUSH, self._step, weight=self._weight)
        self._sent.send()

    def wait(self) -> None:
        """Wait until it is acknowledged. What a server refused is sent again by the next call."""
        assert self._sent is not None
        if self._parts is None:
            self._sent.wait()
            if self._sent.is_done_by_all():
                return
            parts = [self._part_of(self._sent, rank) for rank in self._sent.servers]
            self._unanswered = parts.copy()
            self._parts = parts
        while self._unanswered:
            self._unanswered[0].wait()
            del self._unanswered[0]

    def rows(self) -> list[Rows]:
        """Return the rows that came with the acknowledgement, one (n, dim) array per `PullSpec`."""
        assert self._sent is not None
        if self._parts is None:
            return self._sent.rows()
        return self._sent.request.merge({rank: p.rows for rank, p in enumerate(self._parts) if p.rows is not None})

    def _part_of(self, sent: FanOut, rank: int) -> PushRequest:
        part, result = ServerPart(sent.request, rank), partial(sent.reply, rank)
        return PushRequest(sent.connections[rank], part, self._step, self._weight, result)


@dataclass(frozen=True, slots=True)
class PulledAfter:
    """Rows that come with the answers to a push."""

    push: SentPush
    flush: Callable[[], None]
    """Waits for the answers."""

    def rows(self) -> list[Rows]:
        """Wait and return one (n, dim) array per `PullSpec`."""
        self.flush()
        return self.push.rows()


class MovablePull:
    """A pull that is asked again of the servers that the job has, where their number changed before it was answered.

    Args:
        send: Asks the servers there are.
        follow: Continues with those that the job has now.
    """

    def __init__(self, send: Callable[[], PullRequest], follow: Callable[[], None]) -> None:
        self._send, self._follow = send, follow
        self._pull = send()

    def rows(self) -> list[Rows]:
        """Wait and return one (n, dim) array per `PullSpec`."""
        while True:
            try:
                return self._pull.rows()
            except ServersMovedError:
                self._follow()
                self._pull = self._send()
