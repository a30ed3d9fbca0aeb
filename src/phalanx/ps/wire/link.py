"""One connected and greeted way to a server; a `Connection` has one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.ps.wire import frame
from phalanx.ps.wire.channel import Channel, Part
from phalanx.ps.wire.frame import Array, Bytes, FrameKind, PayloadLayout
from phalanx.ps.wire.segments import SMALLEST_SHARED, SegmentLease, SegmentPool


@dataclass(slots=True)
class EncodedRequest:
    """A request on its way over one link: what was written for it, and the shared memory it uses."""

    parts: list[Part]
    lease: SegmentLease | None = None
    payload_bytes: int = 0
    descriptor: int | None = None

    @property
    def request_memory(self) -> Bytes | None:
        """Return where the request's arrays lie, when they are shared."""
        return None if self.lease is None else self.lease.memory[: self.payload_bytes]


class ServerLink:
    """A channel to a server, and the memory shared with it when it is on this host."""

    def __init__(self, channel: Channel, where: str, pool: SegmentPool | None) -> None:
        self.channel = channel
        self.where = where
        self._pool = pool

    def encode(
        self,
        client: int,
        seq: int,
        content: dict[str, Any],
        layout: PayloadLayout,
        arrays: Sequence[Array],
        reply_bytes: int,
    ) -> EncodedRequest:
        """Make a request ready to be written: arrays into shared memory when that is there and they are large."""
        lease = self._lease(layout.payload_bytes, reply_bytes)
        content["arrays"] = layout.describe()
        if lease is None:
            head = frame.encode(FrameKind.REQUEST, 0, client, seq, content, layout.payload_bytes)
            return EncodedRequest([head, *frame.chunks(layout, arrays)])
        layout.write(arrays, lease.memory[: layout.payload_bytes])
        segment = lease.segment
        content["segment"] = [segment.number, segment.size]
        flags = frame.SHARED | (frame.NEW_SEGMENT if segment.descriptor is not None else 0)
        head = frame.encode(FrameKind.REQUEST, flags, client, seq, content, layout.payload_bytes)
        return EncodedRequest([head], lease, layout.payload_bytes, segment.descriptor)

    def write(self, request: EncodedRequest, deadline: float, on_full: Callable[[], None]) -> None:
        """Write an encoded request; calls `on_full` when the server takes no more for now.

        Raises:
            OSError: If the link is broken or `deadline` passes.
        """
        self.channel.send(request.parts, deadline=deadline, descriptor=request.descriptor, on_full=on_full)
        request.parts = []
        if request.lease is not None:
            request.lease.segment.forget_descriptor()

    def _lease(self, payload_bytes: int, reply_bytes: int) -> SegmentLease | None:
        if self._pool is None or max(payload_bytes, reply_bytes) < SMALLEST_SHARED:
            return None
        return self._pool.lease(frame.aligned(payload_bytes) + reply_bytes)


def reply_memory(request: EncodedRequest | None, at: Any, count: int) -> Bytes:
    """Return where a reply lies in the memory of its request, which is None if that was given up meanwhile.

    Raises:
        FrameError: If it claims a place outside of it.
    """
    if (
        request is None
        or request.lease is None
        or type(at) is not int
        or at < 0
        or at + count > request.lease.segment.size
    ):
        raise frame.FrameError(f"a reply lies at {str(at)[:20]} of memory it does not have")
    return request.lease.memory[at : at + count]
