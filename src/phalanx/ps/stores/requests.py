"""`PullRequest` and `PushRequest`: send pulls and pushes to servers, wait for replies, retry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.ps.stores.base import Keys, Rows
from phalanx.ps.stores.partition import PartitionedRequest, PullNumbers
from phalanx.ps.stores.update import TableUpdate
from phalanx.ps.wire.connection import Connection
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


@dataclass(frozen=True, slots=True)
class ServerPart:
    """The part of a request that goes to one server, as a `DataRequest` takes it."""

    request: PartitionedRequest
    server: int
    with_keys: bool = False
    """Whether the keys come along even where an earlier pull had them."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of keys, values and columns."""
        return self.request.payload_bytes(self.server, self.with_keys)

    @property
    def rows_bytes(self) -> int:
        """Bytes of the rows that it reads."""
        return self.request.rows_bytes(self.server)

    @property
    def counts(self) -> tuple[int, int]:
        """Tables it pushes, and tables it reads."""
        return self.request.counts(self.server)

    def heads(self) -> bytes:
        """Return what the frame says of each table."""
        return self.request.heads(self.server, self.with_keys)

    def write(self, memory: Bytes) -> None:
        """Write the payload."""
        self.request.write(self.server, self.with_keys, memory)


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
        for rank, connection in enumerate(connections):
            if self._request.counts(rank)[1]:
                request = DataRequest(FrameKind.PULL, ServerPart(self._request, rank), step, keep=self._keep)
                self._sent[rank] = connection, request, connection.post(request)

    def rows(self) -> list[Rows]:
        """Wait and return one (n, dim) array per `PullSpec`."""
        if self._rows is None:
            self._before()
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
        self._connection, self._part, self._step, self._weight = connection, part, step, weight
        self._pending: Pending | None = None
        self.rows: Bytes | None = None
        """The rows that were asked with it, once they came."""

    def send(self) -> None:
        """Send the push."""
        self._pending = self._connection.post(DataRequest(FrameKind.PUSH, self._part, self._step, self._weight))

    def wait(self) -> None:
        """Wait until it is acknowledged; sends it again if it was refused before, or its pull is forgotten."""
        if self._pending is None:
            self._part = ServerPart(self._part.request, self._part.server, with_keys=True)
            self.send()
        assert self._pending is not None
        pending, self._pending = self._pending, None
        reply: DataReply = pending.result()
        if reply.status == DataStatus.NEED_KEYS:
            self.wait()
        elif self._part.counts[1]:
            self.rows = reply.rows


class PulledAfter:
    """Rows that come with the answers to a push.

    Args:
        pushes: The push, by the servers' ranks.
        request: What was asked with it.
        flush: Waits for the answers.
    """

    def __init__(self, pushes: Sequence[PushRequest], request: PartitionedRequest, flush: Callable[[], None]) -> None:
        self._pushes, self._request, self._flush = pushes, request, flush

    def rows(self) -> list[Rows]:
        """Wait and return one (n, dim) array per `PullSpec`."""
        self._flush()
        return self._request.merge({rank: p.rows for rank, p in enumerate(self._pushes) if p.rows is not None})
