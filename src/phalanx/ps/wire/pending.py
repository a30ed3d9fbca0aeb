"""Requests without an answer: what is known of each, in which order they went, and what becomes of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from phalanx import errors
from phalanx.errors import InternalError, PhalanxError
from phalanx.ps.wire import frame
from phalanx.ps.wire.frame import Array, FrameError, FrameKind, Header, PayloadLayout
from phalanx.ps.wire.link import EncodedRequest, ServerLink, reply_memory
from phalanx.ps.wire.message import RpcReply
from phalanx.ps.wire.receive import MemoryBudget, PayloadReader


class Pending:
    """A request under way.

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
        self.reply_bytes = reply_bytes
        self._meta, self._wait = meta, wait
        self.seq = 0
        self.request: EncodedRequest | None = None
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

    def content(self) -> dict[str, Any]:
        """Return the object of the request's frame."""
        return {"op": self.op, "meta": self._meta}

    def settle(self, outcome: RpcReply | PhalanxError) -> None:
        """Give the request its outcome and let go of what it was made of."""
        self.outcome = outcome
        self.request = None
        self.arrays = ()

    def read_outcome(
        self, link: ServerLink, header: Header, content: dict[str, Any], peer: str, deadline: float | None
    ) -> RpcReply | PhalanxError:
        """Return the `RpcReply` in a frame that answers this request, its arrays read, or the error that it reports.

        Raises:
            FrameError: If the frame makes no sense.
            OSError: If the link breaks or `deadline` passes.
        """
        if header.kind == FrameKind.ERROR:
            return _raised(content, peer)
        layout = frame.layout_from(content.get("arrays"))
        if layout.payload_bytes != header.payload_bytes:
            raise FrameError(f"a payload of {header.payload_bytes} bytes for arrays of {layout.payload_bytes}")
        if header.flags & frame.SHARED:
            memory = reply_memory(self.request, content.get("at"), layout.payload_bytes)
        else:
            budget = MemoryBudget(frame.LARGEST_PAYLOAD * 2)
            received = PayloadReader(link.channel, budget).receive(layout.payload_bytes, deadline)
            assert received is not None
            memory = received
        return RpcReply(content.get("meta") or {}, layout.read(memory))


class InFlight:
    """The requests of one connection without an answer, in their order. Its users hold the connection's lock.

    Args:
        most_bytes: Payload that may be on its way; one request alone may be larger.
    """

    def __init__(self, most_bytes: int) -> None:
        self.bytes = 0
        self._most_bytes = most_bytes
        self._queue: deque[Pending] = deque()

    def __bool__(self) -> bool:
        return bool(self._queue)

    def __iter__(self) -> Iterator[Pending]:
        return iter(self._queue)

    def reserve(self, pending: Pending) -> bool:
        """Count the bytes of a request in, if they fit."""
        size = pending.layout.payload_bytes
        if self.bytes and self.bytes + size > self._most_bytes:
            return False
        self.bytes += size
        return True

    def give_back(self, pending: Pending) -> None:
        """Count the bytes of a request out that was not sent."""
        self.bytes -= pending.layout.payload_bytes

    def add(self, pending: Pending) -> None:
        """Expect an answer to a request, after those to the ones before."""
        self._queue.append(pending)

    def answered_by(self, header: Header) -> Pending:
        """Return the request that a frame is about.

        Raises:
            FrameError: If that is not the one whose turn it is.
        """
        first = self._queue[0] if self._queue else None
        if first is None or header.seq != first.seq or header.kind == FrameKind.REQUEST:
            raise FrameError(f"a {header.kind.name.lower()} to request {header.seq}, which is not the next")
        return first

    def settle(self, pending: Pending, outcome: RpcReply | PhalanxError) -> bool:
        """Give the first request its outcome; returns False if all were given up while it was read."""
        if not self._queue or self._queue[0] is not pending:
            return False
        self._queue.popleft()
        self.bytes -= pending.layout.payload_bytes
        pending.settle(outcome)
        return True

    def settle_all(self, outcome_of: Callable[[Pending], PhalanxError]) -> None:
        """Give up every request."""
        for pending in self._queue:
            pending.settle(outcome_of(pending))
        self._queue.clear()
        self.bytes = 0

    def put_off(self, deadline: float) -> None:
        """Let every answer take until `deadline`."""
        for pending in self._queue:
            pending.deadline = deadline


def _raised(content: dict[str, Any], peer: str) -> PhalanxError:
    """Return the error that a server reports, as the class it had there."""
    name, message = str(content.get("error")), str(content.get("message"))
    error_class = getattr(errors, name, None)
    if isinstance(error_class, type) and issubclass(error_class, PhalanxError):
        return error_class(message)
    return InternalError(f"{peer} failed with {name}: {message}")
