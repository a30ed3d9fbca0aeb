"""`RpcRequest`, `RpcReply` and `ReplyBuffer`: RPC messages as handlers see them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from phalanx import errors
from phalanx.errors import InternalError, PhalanxError
from phalanx.ps.wire import frame
from phalanx.ps.wire.channel import Channel, Part
from phalanx.ps.wire.data_frame import TakePayload
from phalanx.ps.wire.frame import Array, Bytes, FrameError, FrameKind, Header
from phalanx.ps.wire.segments import SMALLEST_SHARED, ReplyBuffer, SegmentLease, SegmentPool, SharedSegment


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

    report_work: Callable[[str, bool], None] = lambda does, has_moved: None
    """Tells the client what the server itself does before it answers, as `loads: 41 % of ...`, and whether it advanced
    since the last report. Raises `ClosedError` when the client is gone."""


Handler = Callable[[RpcRequest], RpcReply]
"""Answers one request; may block; raises a `PhalanxError` to have it raised in the client."""


class WireRequest(Protocol):
    """What a `Pending` sends: a `ControlRequest`, or the `DataRequest` of a pull or push."""

    @property
    def op(self) -> str:
        """What is asked, for messages."""
        ...

    @property
    def kind(self) -> FrameKind:
        """Of its frame."""
        ...

    @property
    def payload_bytes(self) -> int:
        """Bytes of its arrays."""
        ...

    @property
    def reply_bytes(self) -> int:
        """Room for the arrays of the reply in shared memory."""
        ...

    def encode(self, segment: SharedSegment | None) -> bytes:
        """Return the object of its frame."""
        ...

    def write(self, memory: Bytes) -> None:
        """Write its arrays."""
        ...

    def decode_reply(self, kind: FrameKind, raw: bytes | bytearray, count: int, take: TakePayload) -> Any:
        """Return the reply. See `DataRequest.decode_reply`."""
        ...


class ControlRequest:
    """A request whose object is JSON.

    Args:
        op: What is asked.
        meta: Any JSON object.
        arrays: Arrays of the types in `frame.DTYPES`.
        reply_bytes: Room for the arrays of the reply in shared memory.
    """

    kind = FrameKind.REQUEST

    def __init__(self, op: str, meta: Mapping[str, Any], arrays: Sequence[Array] = (), reply_bytes: int = 0) -> None:
        self.op, self.reply_bytes = op, reply_bytes
        self._meta, self._arrays, self._layout = meta, arrays, frame.layout_of(arrays)
        self.payload_bytes = self._layout.payload_bytes

    def encode(self, segment: SharedSegment | None) -> bytes:
        """Return the object."""
        content: dict[str, Any] = {"op": self.op, "meta": self._meta, "arrays": self._layout.describe()}
        if segment is not None:
            content["segment"] = [segment.number, segment.size]
        return json.dumps(content, separators=(",", ":")).encode()

    def write(self, memory: Bytes) -> None:
        """Write the arrays, and let go of them: they are the caller's again."""
        self._layout.write(self._arrays, memory)
        self._arrays = ()

    def decode_reply(self, kind: FrameKind, raw: bytes | bytearray, count: int, take: TakePayload) -> RpcReply:
        """Return the reply. See `DataRequest.decode_reply`."""
        if kind != FrameKind.REPLY:
            raise FrameError(f"a {kind.name.lower()} to {self.op!r}")
        content = frame.parse_object(raw)
        layout, at = frame.layout_from(content.get("arrays"), count), content.get("at", 0)
        if type(at) is not int:
            raise FrameError(f"a reply lies at {str(at)[:20]}")
        return RpcReply(content.get("meta") or {}, layout.read(take(at, count)))


class Pending:
    """A request under way, as `Connection.send` and `Connection.post` return it.

    Args:
        request: What is sent.
        wait: Waits for the outcome, and returns or raises it.
    """

    __slots__ = (
        "_parts",
        "_payload",
        "_request",
        "_wait",
        "deadline",
        "lease",
        "op",
        "outcome",
        "payload_bytes",
        "progress_at",
        "reply_bytes",
        "sent_at",
        "seq",
        "server_state",
    )

    def __init__(self, request: WireRequest, wait: Callable[[Pending], Any]) -> None:
        self.op, self.payload_bytes, self.reply_bytes = request.op, request.payload_bytes, request.reply_bytes
        self._request, self._wait = request, wait
        self._parts: Sequence[Part] = ()
        self._payload: Bytes | None = None
        """The arrays as they were first written, for a link that is made anew."""

        self.lease: SegmentLease | None = None
        """The shared memory of the request and its reply, once it is encoded for a link that has some for it."""

        self.seq = 0
        self.server_state = ""
        """What the server said that it does before it answers: `waits for worker 2`, `recovers: 41 % of ...`."""

        self.sent_at = self.deadline = 0.0
        self.progress_at = 0.0
        """When the server said last that its own work continues, if it did."""

        self.outcome: Any = None
        """The reply, or the `PhalanxError` to raise; None until then."""

    def result(self) -> Any:
        """Wait for the reply: an `RpcReply`, or the `DataReply` to a pull or push.

        Raises:
            PhalanxError: The one that the server raised, of the same class.
            PeerLostError: If the server is gone, or is silent until the deadline.
            ClosedError: If the connection was closed first.
        """
        return self._wait(self)

    @property
    def waits_since(self) -> float:
        """From when on the wait counts that may be a hang."""
        return max(self.sent_at, self.progress_at)

    def encode(self, client: int, pool: SegmentPool | None, *, has_checksums: bool) -> None:
        """Make the request ready to be written over a link.

        Args:
            client: Number of the client that asks.
            pool: Memory shared over that link, if there is some; large arrays go there.
            has_checksums: See `Channel.has_checksums`.
        """
        request, size, flags = self._request, self.payload_bytes, 0
        if self._payload is None and self.lease is not None:
            self._payload = self.lease.memory[:size]
        lease = None if pool is None else self._lease_of(pool)
        memory: Bytes = np.empty(size, np.uint8) if lease is None else lease.memory[:size]
        if self._payload is None:
            request.write(memory)
        else:
            memory[...] = self._payload
        # A view of shared memory keeps its lease, so what was written there outlives the link.
        self._payload, self.lease = memory, lease
        segment = None
        if lease is not None:
            segment = lease.segment
            flags = frame.SHARED | (frame.NEW_SEGMENT if segment.descriptor is not None else 0)
        parts: list[Part] = [frame.encode_raw(request.kind, flags, client, self.seq, request.encode(segment), size)]
        if lease is None and size:
            parts += frame.chunks(frame.layout_of([memory]), [memory], has_checksums=has_checksums)
        self._parts = parts

    def resume(self, seq: int, payload: Bytes, lease: SegmentLease | None, sent_at: float, deadline: float) -> None:
        """Be a request that native code sent with this payload, which lies in the memory of `lease` if there is one."""
        self.seq, self.lease, self.sent_at, self.deadline = seq, lease, sent_at, deadline
        self._payload = payload if lease is None else None

    def set_rest(self, rest: bytes) -> None:
        """Leave a part of the request to be written."""
        self._parts = [rest]

    def take_parts(self) -> Sequence[Part]:
        """Return what to write, and let go of it."""
        parts, self._parts = self._parts, ()
        return parts

    def _lease_of(self, pool: SegmentPool) -> SegmentLease | None:
        is_large = self.payload_bytes >= SMALLEST_SHARED or self.reply_bytes >= SMALLEST_SHARED
        return pool.lease(frame.aligned(self.payload_bytes) + self.reply_bytes) if is_large else None

    def settle(self, outcome: Any) -> None:
        """Give the request its outcome and let go of what it was made of."""
        self.outcome = outcome
        self.lease, self._parts, self._payload = None, (), None

    def read_outcome(
        self, channel: Channel, header: Header, raw: bytes | bytearray, peer: str, deadline: float | None
    ) -> Any:
        """Return the reply in a frame that answers this request, its arrays read, or the error that it reports.

        Raises:
            FrameError: If the frame makes no sense.
            OSError: If the channel breaks or `deadline` passes.
        """
        if header.kind == FrameKind.ERROR:
            return _raised(frame.parse_object(raw), peer)

        def take(at: int, count: int) -> Bytes:
            if header.flags & frame.SHARED:
                return self.reply_memory(at, count)
            received = channel.read_payload(count, deadline)
            assert received is not None
            return received

        return self._request.decode_reply(header.kind, raw, header.payload_bytes, take)

    def reply_memory(self, at: int, count: int) -> Bytes:
        """Return shared memory in which the reply lies.

        Raises:
            FrameError: If it lies in none that the request has now; a new link has given it another.
        """
        lease = self.lease  # None if the request was given up meanwhile
        if lease is None or at < 0 or at + count > lease.segment.size:
            raise FrameError(f"a reply lies at {at} of memory it does not have")
        return lease.memory[at : at + count]


def _raised(content: dict[str, Any], peer: str) -> PhalanxError:
    """Return the error that a server reports, as the class it had there."""
    name, message = str(content.get("error")), str(content.get("message"))
    error_class = getattr(errors, name, None)
    if isinstance(error_class, type) and issubclass(error_class, PhalanxError):
        return error_class(message)
    return InternalError(f"{peer} failed with {name}: {message}")
