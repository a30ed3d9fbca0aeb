"""`ServerLink`: one authenticated socket to a server; a `Connection` replaces a broken one.

Whoever waits for an answer reads the socket, which saves two switches between threads for every answer; a thread reads
while nobody waits. It is there because answers must be taken in any case: a server that cannot write them reads no
requests either, and one that is gone should be noticed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from phalanx.ps.wire import frame
from phalanx.ps.wire.channel import Channel, UnixChannel, error_text
from phalanx.ps.wire.client.client_link import ClientLink
from phalanx.ps.wire.client.in_flight import InFlight
from phalanx.ps.wire.frame import FrameError, FrameKind, Header
from phalanx.ps.wire.message import Pending
from phalanx.ps.wire.segments import SegmentLease, SegmentPool

_IDLE_S = 0.2
"""After so long without anybody reading the thread does."""


class ServerLink:
    """A connected and greeted socket, with the memory shared over it when the server is on this host.

    Frames are taken off it in one thread at a time.

    Args:
        channel: The socket.
        state: What native code knows of this link, too.
        where: The server's address, for messages.
        in_flight: The requests of the connection; a new link takes those over that a lost one left.
        peer: Who the server is, as `server 0`.
        lock: The connection's lock.
        changed: Over that lock; notified after every frame.
        waits: Called when the server reports that a request waits: for whom, and whether they are connected.
        works: Called when the server reports what it does before it answers anything, and whether that advanced; with
            an empty text when it answers again.
        lost: Called by this link's thread as its last act, with why the link can be read no more.
    """

    def __init__(
        self,
        channel: Channel,
        state: ClientLink,
        where: str,
        in_flight: InFlight,
        *,
        peer: str,
        lock: threading.RLock,
        changed: threading.Condition,
        waits: Callable[[Pending, str, bool], None],
        works: Callable[[str, bool], None],
        lost: Callable[[ServerLink, str], None],
    ) -> None:
        self.channel, self.state, self.where = channel, state, where
        self.has_failed_start = False
        """Whether the server said that it will not answer."""

        self._in_flight, self._peer = in_flight, peer
        self.pool = SegmentPool() if isinstance(channel, UnixChannel) else None
        self.thread = threading.Thread(target=self._read_when_idle, name=f"replies of {peer}", daemon=True)
        self._lock, self._changed, self._thread_condition = lock, changed, threading.Condition(lock)
        self._waits, self._works, self._lost = waits, works, lost
        self._is_thread_needed = False
        self._end: str | None = None

    def lease(self, size: int) -> SegmentLease | None:
        """Return memory shared over this link; see `SegmentPool.lease`."""
        return None if self.pool is None else self.pool.lease(size)

    def encode(self, pending: Pending, client: int) -> None:
        """Make a request of the client of that number ready to be written here."""
        pending.encode(client, self.pool, has_checksums=self.channel.has_checksums)

    def write(self, pending: Pending, deadline: float) -> None:
        """Write an encoded request, with the answers before it read whenever the server takes no more.

        Raises:
            OSError: If the link is broken or `deadline` passes.
        """
        lease, parts = pending.lease, pending.take_parts()
        descriptor = None if lease is None else lease.segment.descriptor
        self.channel.send(parts, deadline=deadline, descriptor=descriptor, on_full=self.read_on)
        if lease is not None:
            lease.segment.forget_descriptor()

    def is_free(self, until: float) -> bool:
        """Return True if the caller may `read` now, else wait for another's frame first. Runs with the lock held.

        Args:
            until: When to stop waiting, on the clock of `time.monotonic`.
        """
        if not (self.state.is_reading or self._end is not None):
            return True
        self.state.has_waiter = True
        self._changed.wait(max(0.0, until - time.monotonic()))
        return False

    def read(self, deadline: float | None, awaited: Pending | None = None) -> bool:
        """Take one frame, if nobody else does and one begins before `deadline`; return whether nobody else did.

        Args:
            deadline: On the clock of `time.monotonic`.
            awaited: Whose answer the caller waits for: if another took that meanwhile, perhaps no frame comes any more.
        """
        is_reader, why = False, None
        try:
            with self._lock:
                has_answer = awaited is not None and awaited.outcome is not None
                if has_answer or self.state.is_reading or self._end is not None:
                    return False
                self.state.is_reading = self.state.was_read = is_reader = True
            if self.channel.has_bytes(deadline):
                why = "reading its answer was interrupted"
                self._take_frame(deadline)
                why = None
        except (OSError, FrameError, MemoryError) as error:
            why = error_text(error)
        finally:
            if is_reader:
                # Nothing here runs code that a signal could break off before others may read.
                self._end = self._end or why
                self.state.has_ended = self._end is not None
                self.state.is_reading = False
                with self._lock:
                    self.notify()
        return is_reader

    def read_next(self) -> None:
        """Take one frame, if nobody else does, an answer is due, and one begins before that is late."""
        with self._lock:
            first = self._in_flight.first
        if first is not None:
            self.read(first.deadline, first)

    def notify(self) -> None:
        """Wake whoever waits until nobody reads. Runs with the lock held."""
        self._changed.notify_all()
        if self._end or self._is_thread_needed:
            self._thread_condition.notify()

    def read_on(self) -> None:
        """Let the thread read soon: the caller waits for what answers that nobody takes may hold up."""
        with self._lock:
            self._is_thread_needed = self.state.has_waiter = True
            self._thread_condition.notify()

    def interrupt(self) -> None:
        """Break the link: whoever reads or writes stops, and the thread comes to its end."""
        self.channel.interrupt()
        self.read_on()

    def _take_frame(self, deadline: float | None) -> None:
        header, raw = self.channel.read_head(deadline)
        if header.seq == 0:
            self._take_server_frame(header, raw)
            return
        with self._lock:
            pending = self._in_flight.expect_answer(header)
        if header.kind == FrameKind.WAITING:
            content = frame.parse_object(raw)
            self._waits(pending, str(content.get("for")), content.get("here") is True)
            return
        outcome = pending.read_outcome(self.channel, header, raw, self._peer, deadline)
        with self._lock:
            self.state.has_answered |= self._in_flight.settle(pending, outcome)

    def _take_server_frame(self, header: Header, raw: bytearray) -> None:
        """Take a frame that is about the server itself, and about no request."""
        content = frame.parse_object(raw)
        if header.kind == FrameKind.WAITING:
            self._works(str(content.get("does")), content.get("moved") is True)
        elif header.kind == FrameKind.ERROR:
            self.has_failed_start = True
            raise ConnectionAbortedError(f"it cannot start: {str(content.get('message')).rstrip('.')}")
        else:
            raise FrameError(f"a {header.kind.name.lower()} to no request")

    def _read_when_idle(self) -> None:
        """Read while nobody waits, until the link is broken."""
        goes_on = False
        while True:
            with self._lock:
                if not goes_on:
                    self.state.was_read = False
                    self._thread_condition.wait_for(self._is_due, _IDLE_S)
                if self._end:
                    break
                is_left_to_others = self.state.was_read and not (goes_on or self._is_thread_needed)
                goes_on = False
                if self.state.is_reading or is_left_to_others:
                    continue
                self.state.has_waiter = self._is_thread_needed = False
                self._changed.notify_all()  # a signal may have broken off that of a reader
            goes_on = self.read(None) and not self.state.has_waiter
        self._lost(self, self._end)

    def _is_due(self) -> bool:
        return self._end is not None or (self._is_thread_needed and not self.state.is_reading)
