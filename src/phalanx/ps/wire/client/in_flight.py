"""`InFlight`: the requests of one connection without an answer, in their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from phalanx.errors import PhalanxError
from phalanx.ps.wire import frame
from phalanx.ps.wire.client.client_link import ClientLink
from phalanx.ps.wire.frame import FrameError, Header
from phalanx.ps.wire.message import Pending


class PartsUnderWay(Protocol):
    """A request of which native code has parts under way."""

    def pending_part(self, server: int) -> Pending:
        """Return the part of a server as its connection knows it; the same one each time."""
        ...


class InFlight:
    """The requests of one connection without an answer, in their order. Its users hold the connection's lock.

    Native code has requests under way for which there is no `Pending`, until anybody has to know them: then they are
    taken over.

    Args:
        most_bytes: Payload that may be on its way; one request alone may be larger.
    """

    def __init__(self, most_bytes: int) -> None:
        self.bytes = 0
        self.most_bytes = most_bytes
        self.link: ClientLink | None = None
        """Where native code has requests under way."""

        self._pending: deque[Pending] = deque()

    @property
    def is_clear(self) -> bool:
        """Whether native code may send: no request is under way here."""
        return not self._pending

    def take_over(self) -> None:
        """Have the requests of native code, which has none then."""
        while self.link is not None and (due := self.link.first_due()) is not None:
            request, server = due
            pending = request.pending_part(server)
            if self.link.hand_over(request, self._pending, pending):
                self.bytes += pending.payload_bytes

    @property
    def _queue(self) -> deque[Pending]:
        self.take_over()
        return self._pending

    def __bool__(self) -> bool:
        return bool(self._queue)

    def __iter__(self) -> Iterator[Pending]:
        return iter(self._queue)

    def has_room(self, pending: Pending) -> bool:
        """Return whether a request may be sent now."""
        if not self._queue:
            self.bytes = 0  # whatever signals broke off before
        return not self.bytes or self.bytes + pending.payload_bytes <= self.most_bytes

    def add(self, pending: Pending) -> None:
        """Expect an answer to a request, after those to the ones before."""
        self._queue.append(pending)
        self.bytes += pending.payload_bytes

    @property
    def first(self) -> Pending | None:
        """The request that the next answer is to."""
        return self._queue[0] if self._queue else None

    def expect_answer(self, header: Header) -> Pending:
        """Return the request that a frame is about.

        Raises:
            FrameError: If that is not the one whose turn it is.
        """
        first = self.first
        if first is None or header.seq != first.seq or header.kind in frame.REQUEST_KINDS:
            raise FrameError(f"a {header.kind.name.lower()} to request {header.seq}, which is not the next")
        return first

    def settle(self, pending: Pending, outcome: Any) -> bool:
        """Give the first request its outcome; returns False if all were given up while it was read."""
        if not self._queue or self._queue[0] is not pending:
            return False
        pending.outcome = outcome  # first: whoever waits has it, whatever a signal breaks off here
        self._pending.popleft()
        self.bytes -= pending.payload_bytes
        pending.settle(outcome)
        return True

    def settle_all(self, outcome_of: Callable[[Pending], PhalanxError]) -> None:
        """Give up every request."""
        for pending in self._queue:
            pending.settle(outcome_of(pending))
        self._queue.clear()
        self.bytes = 0

    def note_work(self, does: str, moved_at: float | None) -> None:
        """Note what the server does before it answers, and when that last advanced, if it did."""
        for pending in self._queue:
            pending.server_state = does
            pending.progress_at = pending.progress_at if moved_at is None else moved_at

    def put_off(self, deadline: float) -> None:
        """Let every answer take until `deadline`."""
        for pending in self._queue:
            pending.deadline = deadline
