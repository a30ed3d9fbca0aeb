"""`RpcRequest`, `RpcReply` and `ReplyBuffer`: RPC messages as handlers see them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx import errors
from phalanx.errors import InternalError, PhalanxError
from phalanx.ps.wire import frame
from phalanx.ps.wire.channel import Channel, Part
from phalanx.ps.wire.frame import Array, Bytes, FrameError, FrameKind, Header, PayloadLayout
from phalanx.ps.wire.segments import SMALLEST_SHARED, ReplyBuffer, SegmentLease, SegmentPool


@dataclass(frozen=True, slots=True)
class RpcReply:
    """The answer to a request.

    On the client the arrays belong to the caller for as long as it keeps them. They may lie in a shared segment, which
    is used again once the last of them is gone; a caller that keeps a few rows of many for long should copy them.
    """

    meta: Mapping[str, Any] = field(default_factory=dict)
    """Any JSON object."""

    arrays: Sequence[Array] = ()
    """Arrays of the types in `frame.DTYPES`."""


@dataclass(frozen=True, slots=True)
class RpcRequest:
    """One request, as the handler of a `Listener` gets it.

    The arrays may lie in memory shared with the client: they are valid until the handler returns. What is kept longer
    must be copied.
    """

    op: str
    meta: dict[str, Any]
    arrays: list[Array]
    client: int
    """The client's number, from the handshake."""

    seq: int
    """1, 2, ... per client; a request that is sent again after a lost connection keeps its number."""

    peer: str
    """Name the client gave, as `worker 1`."""

    reply_buffer: ReplyBuffer = field(default_factory=lambda: ReplyBuffer(None))
    """Where arrays of the reply can be made without a copy: `request.reply_buffer.empty((n, dim), np.float32)`."""

    report_wait: Callable[[str, bool], None] = lambda waits_for, is_connected: None
    """Tells the client that its answer waits for others: for whom, in words, and whether they are there. While they
    are, the answer is not late. Raises `ClosedError` when the client is gone."""


Handler = Callable[[RpcRequest], RpcReply]
"""Answers one request; may block; raises a `PhalanxError` to have it raised in the client."""


class Pending:
    """A request under way, as `Connection.send` returns it.

    Args:
        op: What is asked.
        meta: Any JSON object.
        arrays: Arrays of the types in `frame.DTYPES`.
        reply_bytes: Room for the arrays of the reply in shared memory.
        wait: Waits for the outcome, and returns or raises it.
    """

    def __init__(
        self,
        op: str,
        meta: Mapping[str, Any],
        arrays: Sequence[Array],
        reply_bytes: int,
        wait: Callable[[Pending], RpcReply],
    ) -> None:
        self.op = op
        self.layout: PayloadLayout = frame.layout_of(arrays)
        self.arrays = arrays
        self._meta, self._reply_bytes, self._wait = meta, reply_bytes, wait
        self._parts: list[Part] = []
        self.lease: SegmentLease | None = None
        """The shared memory of the request and its reply, once it is encoded for a link that has some for it."""

        self.seq = 0
        self.waits_for = ""
        self.sent_at = self.deadline = 0.0
        self.outcome: RpcReply | PhalanxError | None = None

    def result(self) -> RpcReply:
        """Wait for the reply.

        Raises:
            PhalanxError: The one that the server raised, of the same class.
            PeerLostError: If the server is gone, or is silent until the deadline.
            ClosedError: If the connection was closed first.
        """
        return self._wait(self)

    def encode(self, client: int, pool: SegmentPool | None) -> None:
        """Make the request ready to be written over a link.

        Args:
            client: Number of the client that asks.
            pool: Memory shared over that link, if there is some; large arrays go there.
        """
        if self.lease is not None:
            # Kept, because the new link may have no shared memory for them, and be lost too.
            self.arrays = self.layout.read(self.lease.memory)
        size, flags = self.layout.payload_bytes, 0
        is_large = max(size, self._reply_bytes) >= SMALLEST_SHARED
        self.lease = pool.lease(frame.aligned(size) + self._reply_bytes) if pool is not None and is_large else None
        content: dict[str, Any] = {"op": self.op, "meta": self._meta, "arrays": self.layout.describe()}
        if self.lease is not None:
            segment = self.lease.segment
            self.layout.write(self.arrays, self.lease.memory)
            content["segment"] = [segment.number, segment.size]
            flags = frame.SHARED | (frame.NEW_SEGMENT if segment.descriptor is not None else 0)
        head = frame.encode(FrameKind.REQUEST, flags, client, self.seq, content, size)
        self._parts = [head, *(frame.chunks(self.layout, self.arrays) if self.lease is None else ())]

    def take_parts(self) -> list[Part]:
        """Return what to write, and let go of it."""
        parts, self._parts = self._parts, []
        return parts

    def settle(self, outcome: RpcReply | PhalanxError) -> None:
        """Give the request its outcome and let go of what it was made of."""
        self.outcome = outcome
        self.lease, self._parts, self.arrays = None, [], ()

    def read_outcome(
        self, channel: Channel, header: Header, content: dict[str, Any], peer: str, deadline: float | None
    ) -> RpcReply | PhalanxError:
        """Return the `RpcReply` in a frame that answers this request, its arrays read, or the error that it reports.

        Raises:
            FrameError: If the frame makes no sense.
            OSError: If the channel breaks or `deadline` passes.
        """
        if header.kind == FrameKind.ERROR:
            return _raised(content, peer)
        layout = frame.layout_from(content.get("arrays"), header.payload_bytes)
        if header.flags & frame.SHARED:
            memory = self._reply_memory(content.get("at"), layout.payload_bytes)
        else:
            received = channel.read_payload(layout.payload_bytes, deadline)
            assert received is not None
            memory = received
        return RpcReply(content.get("meta") or {}, layout.read(memory))

    def _reply_memory(self, at: Any, count: int) -> Bytes:
        lease = self.lease  # None if the request was given up meanwhile
        if lease is None or type(at) is not int or at < 0 or at + count > lease.segment.size:
            raise FrameError(f"a reply lies at {str(at)[:20]} of memory it does not have")
        return lease.memory[at : at + count]


def _raised(content: dict[str, Any], peer: str) -> PhalanxError:
    """Return the error that a server reports, as the class it had there."""
    name, message = str(content.get("error")), str(content.get("message"))
    error_class = getattr(errors, name, None)
    if isinstance(error_class, type) and issubclass(error_class, PhalanxError):
        return error_class(message)
    return InternalError(f"{peer} failed with {name}: {message}")
