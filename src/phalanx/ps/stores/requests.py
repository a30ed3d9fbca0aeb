"""`PullRequest` and `SentPush`: send pulls and pushes to servers, wait for replies, retry.

Where the job has another number of servers meanwhile, a pull or push is cut anew and goes to those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.ps.stores.base import Keys, PullSpec, Rows
from phalanx.ps.stores.fan_out import collect, post_all
from phalanx.ps.stores.partition import PartitionedRequest, PullNumbers, ServerPart
from phalanx.ps.stores.update import TableUpdate
from phalanx.ps.wire.client.connection import Connection, ServersMovedError
from phalanx.ps.wire.data_frame import DataReply, DataRequest, DataStatus
from phalanx.ps.wire.frame import Bytes, FrameKind
from phalanx.ps.wire.message import Pending


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
        self._sent: dict[int, tuple[Connection, DataRequest, Pending]] = {}
        self._rows: list[Rows] | None = None
        self.named = NamedPull(keys, np.zeros(request.servers, np.uint64))

    def send(self, connections: Sequence[Connection], step: int) -> None:
        """Ask every server that owns some of the keys."""
        parts = {
            rank: (connection, DataRequest(FrameKind.PULL, ServerPart(self._request, rank), step, keep=self._keep))
            for rank, connection in enumerate(connections)
            if self._request.counts(rank)[1]
        }
        pending = post_all(list(parts.values()))
        self._sent = {rank: (*parts[rank], of_server) for rank, of_server in zip(parts, pending, strict=True)}

    def rows(self) -> list[Rows]:
        """Wait and return one (n, dim) array per `PullSpec`."""
        if self._rows is None:
            self._before()
            collect([(connection, pending) for connection, _, pending in self._sent.values()])
            self._rows = self._request.merge({rank: self._answer(rank) for rank in self._sent})
            self._sent.clear()
        return self._rows

    def _answer(self, rank: int) -> Bytes:
        connection, request, pending = self._sent[rank]
        reply: DataReply = pending.result()
        if reply.status == DataStatus.NEED_PUSH:
            # A push before this pull had to be sent again, and came behind it.
            reply = connection.post(request).result()
        self.named.numbers[rank] = reply.number
        return reply.rows


class PushRequest:
    """A push under way on one server.

    Args:
        connection: To the server.
        part: Its updates, and rows to read once these are in place.
        step: Number of the push.
        weight: Rows of the batch.
    """

    def __init__(self, connection: Connection, part: ServerPart, step: int, weight: float) -> None:
        self.connection = connection
        self._part, self._step, self._weight = part, step, weight
        self.pending: Pending | None = None
        """On its way; None where it has to be sent again."""

        self.rows: Bytes | None = None
        """The rows that were asked with it, once they came."""

    def request(self) -> DataRequest:
        """Return what is sent."""
        return DataRequest(FrameKind.PUSH, self._part, self._step, self._weight)

    def send(self) -> None:
        """Send the push."""
        self.pending = self.connection.post(self.request())

    def wait(self) -> None:
        """Wait until it is acknowledged; sends it again if it was refused before, or its pull is forgotten."""
        if self.pending is None:
            self._part = ServerPart(self._part.request, self._part.server, with_keys=True)
            self.send()
        assert self.pending is not None
        pending, self.pending = self.pending, None
        reply: DataReply = pending.result()
        if reply.status == DataStatus.NEED_KEYS:
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
        self._request: PartitionedRequest | None = None
        self._parts: list[PushRequest] = []
        self._unanswered: list[PushRequest] = []

    def send(self, request: PartitionedRequest, connections: Sequence[Connection]) -> None:
        """Send it, cut for these servers. Each takes it once, however often it is sent."""
        self._request = request
        self._parts = [
            PushRequest(connection, ServerPart(request, rank), self._step, self._weight)
            for rank, connection in enumerate(connections)
        ]
        self._unanswered = self._parts.copy()
        pending = post_all([(part.connection, part.request()) for part in self._parts])
        for part, of_server in zip(self._parts, pending, strict=True):
            part.pending = of_server

    def wait(self) -> None:
        """Wait until it is acknowledged. What a server refused is sent again by the next call."""
        collect([(part.connection, part.pending) for part in self._unanswered if part.pending is not None])
        while self._unanswered:
            self._unanswered[0].wait()
            del self._unanswered[0]

    def rows(self) -> list[Rows]:
        """Return the rows that came with the acknowledgement, one (n, dim) array per `PullSpec`."""
        assert self._request is not None
        return self._request.merge({rank: p.rows for rank, p in enumerate(self._parts) if p.rows is not None})


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
