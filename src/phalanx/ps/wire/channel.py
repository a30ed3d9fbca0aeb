"""`Channel`: a non-blocking socket with deadlines, gathered writes and descriptor passing.

The socket never blocks; what would is waited for with `poll`. One thread may read while another writes.
"""

from __future__ import annotations

import array
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from phalanx.ps.wire import frame
from phalanx.ps.wire.frame import CHECKSUM_BYTES, CHUNK_BYTES, HEADER_BYTES, Bytes, FrameError, Header

if TYPE_CHECKING:
    from phalanx._core import DataSession, TlsStream

Part = bytes | bytearray | memoryview

_AHEAD_BYTES = 1 << 16
_MOST_PARTS = 512
_MOST_DESCRIPTORS = 4
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
_ROOM_FOR_ONE = socket.CMSG_SPACE(array.array("i").itemsize)


class Channel:
    """A TCP socket."""

    has_checksums = True
    """Whether the chunks of a payload have checksums; not where the transport proves what it brings."""

    _is_unix = False

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        self.ahead_memory: Bytes = np.zeros(_AHEAD_BYTES, np.uint8)
        self._ahead = self.ahead_memory.data
        self.ahead_start = self.ahead_end = 0
        """What was read and not taken begins and ends here in `ahead_memory`."""

        self._descriptors: deque[int] = deque()

    def secure(self, deadline: float) -> bytes:
        """Agree on keys where they are needed; returns what the handshake must be bound to.

        Raises:
            OSError: If the other end does not agree before `deadline`.
        """
        return b""

    def fill(self, view: memoryview, deadline: float | None = None) -> None:
        """Read exactly as many bytes as `view` has.

        Raises:
            ConnectionError: If the other end closes before that.
            TimeoutError: If `deadline` (of `time.monotonic`) passes first.
        """
        at = 0
        while at < len(view):
            if self.ahead_start < self.ahead_end:
                count = min(self.ahead_end - self.ahead_start, len(view) - at)
                view[at : at + count] = self._ahead[self.ahead_start : self.ahead_start + count]
                self.ahead_start += count
                at += count
            elif len(view) - at >= _AHEAD_BYTES:
                at += self._receive(view[at:], deadline)
            else:
                self.ahead_start, self.ahead_end = 0, self._receive(self._ahead, deadline)

    def has_bytes(self, deadline: float | None = None) -> bool:
        """Wait until there is something to `fill` from; False if `deadline` passes first.

        Raises:
            ConnectionError: If the other end closes before that.
        """
        while self.ahead_start == self.ahead_end:
            try:
                self.ahead_start, self.ahead_end = 0, self._arrived(self._ahead)
            except BlockingIOError:
                if not self._poll(select.POLLIN, deadline):
                    return False
            except OSError:
                raise
            except BaseException:
                self.interrupt()  # a signal came behind bytes that nobody has now
                raise
        return True

    def read_head(self, deadline: float | None = None) -> tuple[Header, bytearray]:
        """Read header and object of the next frame, as their checksum has them; its payload comes after.

        Raises:
            FrameError: If it is not a frame.
            OSError: If the connection breaks or `deadline` passes.
        """
        head = bytearray(HEADER_BYTES)
        self.fill(memoryview(head), deadline)
        header = frame.decode_header(head)
        raw = bytearray(header.object_bytes)
        self.fill(memoryview(raw), deadline)
        frame.check_object(head, raw)
        return header, raw

    def serve(self, session: DataSession) -> bool:
        """Answer pulls and pushes until another frame is next; False if the server stops.

        Raises:
            FrameError: If what came is no frame.
            OSError: If the connection breaks.
        """
        return self._serve(session)

    def _serve(self, session: DataSession, tls: TlsStream | None = None) -> bool:
        has_more, self.ahead_start, self.ahead_end, descriptors = session.serve(
            self._socket.fileno(),
            self._is_unix,
            self.ahead_memory,
            self.ahead_start,
            self.ahead_end,
            list(self._take_all()),
            tls,
        )
        self._descriptors.extend(descriptors)
        return has_more

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._socket.fileno()

    def read_payload(
        self, count: int, deadline: float | None = None, reserve: Callable[[int], bool] = lambda count: True
    ) -> Bytes | None:
        """Read a payload; it gets memory as it really comes, whatever the header claims.

        Args:
            count: Bytes of the payload.
            deadline: On the clock of `time.monotonic`.
            reserve: Called with the bytes of each chunk before they get memory. If it returns False the payload is
                read and thrown away, and the result is None.

        Raises:
            FrameError: If a checksum is wrong.
            OSError: If the connection breaks or `deadline` passes.
        """
        memory: Bytes = np.empty(min(count, CHUNK_BYTES), np.uint8)
        for start in range(0, count, CHUNK_BYTES):
            end = min(start + CHUNK_BYTES, count)
            if not reserve(end - start):
                self.discard_payload(count - start, deadline)
                return None
            # The system moves pages of large blocks instead of copying them, so to grow by one chunk costs little.
            memory.resize(end, refcheck=False)
            self._read_chunk(memory[start:end], deadline)
        return memory

    def discard_payload(self, count: int, deadline: float | None = None) -> None:
        """Read a payload and keep nothing of it. Raises as `read_payload`."""
        scratch: Bytes = np.empty(min(count, CHUNK_BYTES), np.uint8)
        while count:
            chunk = scratch[: min(count, CHUNK_BYTES)]
            self._read_chunk(chunk, deadline)
            count -= len(chunk)

    def send(
        self,
        parts: Sequence[Part],
        *,
        deadline: float | None = None,
        descriptor: int | None = None,
        on_full: Callable[[], None] | None = None,
    ) -> None:
        """Write all parts in order, and a copy of `descriptor` with the first byte.

        Args:
            parts: What to write.
            deadline: On the clock of `time.monotonic`.
            descriptor: An open file.
            on_full: Called before each wait for the other end to take more.

        Raises:
            ConnectionError: If the other end is gone.
            TimeoutError: If `deadline` passes first.
        """
        remaining = [memoryview(part) for part in parts if len(part)]
        done = 0
        while done < len(remaining):
            try:
                sent = self._send_some(remaining[done : done + _MOST_PARTS], descriptor)
            except BlockingIOError:
                if on_full is not None:
                    on_full()
                self._wait(select.POLLOUT, deadline)
                continue
            descriptor = None
            while sent:
                if sent < len(remaining[done]):
                    remaining[done] = remaining[done][sent:]
                    break
                sent -= len(remaining[done])
                done += 1

    def take_descriptor(self) -> int:
        """Return the oldest descriptor that came; it is the caller's to close.

        Raises:
            FrameError: If none came.
        """
        if not self._descriptors:
            raise FrameError("a frame announces a descriptor that did not come with it")
        return self._descriptors.popleft()

    def interrupt(self, how: int = socket.SHUT_RDWR) -> None:
        """End both directions, or one; a thread that reads or writes here stops waiting."""
        try:
            socket.socket.shutdown(self._socket, how)
        except OSError:
            # The other end was faster, and nobody waits here any more.
            return

    def close(self) -> None:
        """Give back the socket; call it when no thread uses the channel any more."""
        while self._descriptors:
            os.close(self._descriptors.popleft())
        self._socket.close()

    def _take_all(self) -> Iterator[int]:
        while self._descriptors:
            yield self._descriptors.popleft()

    def _read_chunk(self, chunk: Bytes, deadline: float | None) -> None:
        self.fill(chunk.data, deadline)
        if not self.has_checksums:
            return
        checksum = bytearray(CHECKSUM_BYTES)
        self.fill(memoryview(checksum), deadline)
        if not frame.checksum_holds(chunk, checksum):
            raise FrameError("the checksum of a payload is wrong")

    def _receive(self, view: memoryview, deadline: float | None) -> int:
        while True:
            try:
                return self._arrived(view)
            except BlockingIOError:
                self._wait(select.POLLIN, deadline)

    def _arrived(self, view: memoryview) -> int:
        count = self._receive_some(view)
        if not count:
            raise ConnectionAbortedError("it closed the connection")
        return count

    def _wait(self, events: int, deadline: float | None) -> None:
        if not self._poll(events, deadline):
            raise TimeoutError("it did not answer in time")

    def _poll(self, events: int, deadline: float | None) -> bool:
        waiting = select.poll()
        waiting.register(self._socket, events)
        return bool(waiting.poll(None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000))

    def _receive_some(self, view: memoryview) -> int:
        return self._socket.recv_into(view)

    def _send_some(self, parts: list[memoryview], descriptor: int | None) -> int:
        return self._socket.sendmsg(parts)


class UnixChannel(Channel):
    """A Unix socket, which also carries descriptors."""

    _is_unix = True

    def _receive_some(self, view: memoryview) -> int:
        count, ancillary, flags, _ = self._socket.recvmsg_into([view], _ROOM_FOR_ONE, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors = array.array("i")
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
                self._descriptors.extend(descriptors)
        if flags & socket.MSG_CTRUNC or len(self._descriptors) > _MOST_DESCRIPTORS:
            raise FrameError("more descriptors came than frames announce")
        return count

    def _send_some(self, parts: list[memoryview], descriptor: int | None) -> int:
        if descriptor is None:
            return self._socket.sendmsg(parts)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
        return self._socket.sendmsg(parts, [rights])


def prepare_tcp(connected: socket.socket) -> None:
    """Send at once what is written, and notice a host that vanished."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connected.setsockopt(socket.IPPROTO_TCP, option, value)


def error_text(error: Exception) -> str:
    """Return the text of an error, without its number."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
