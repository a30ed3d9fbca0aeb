"""Reading frames from a channel; a payload gets memory as it really comes, whatever its header claims."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from phalanx.ps.wire import frame
from phalanx.ps.wire.channel import Channel
from phalanx.ps.wire.frame import CHECKSUM_BYTES, CHUNK_BYTES, HEADER_BYTES, Bytes, FrameError, Header


def read_head(channel: Channel, deadline: float | None = None) -> tuple[Header, dict[str, Any]]:
    """Read header and object of the next frame; its payload comes after.

    Raises:
        FrameError: If it is not a frame.
        OSError: If the connection breaks or `deadline` passes.
    """
    head = bytearray(HEADER_BYTES)
    channel.fill(memoryview(head), deadline)
    header = frame.decode_header(head)
    raw = bytearray(header.object_bytes)
    channel.fill(memoryview(raw), deadline)
    return header, frame.decode_object(head, raw)


class MemoryBudget:
    """Bytes that all connections of a process may hold together."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._lock = threading.Lock()

    def take(self, count: int) -> bool:
        """Count bytes in, if they fit."""
        with self._lock:
            fits = self.used + count <= self.limit
            self.used += count if fits else 0
            return fits

    def give(self, count: int) -> None:
        """Count bytes out."""
        with self._lock:
            self.used -= count


class PayloadReader:
    """The payload of one message, counted in a budget from its first chunk until `release`."""

    def __init__(self, channel: Channel, budget: MemoryBudget) -> None:
        self._channel = channel
        self._budget = budget
        self._held = 0

    def receive(self, count: int, deadline: float | None = None) -> Bytes | None:
        """Read a payload; None when the budget is spent, with the payload read and thrown away.

        Raises:
            FrameError: If a checksum is wrong.
            OSError: If the connection breaks or `deadline` passes.
        """
        memory: Bytes = np.empty(min(count, CHUNK_BYTES), np.uint8)
        for start in range(0, count, CHUNK_BYTES):
            end = min(start + CHUNK_BYTES, count)
            if not self._budget.take(end - start):
                discard(self._channel, count - start, deadline)
                return None
            self._held += end - start
            # The system moves pages of large blocks instead of copying them, so to grow by one chunk costs little.
            memory.resize(end, refcheck=False)
            _read_checked(self._channel, memory[start:end], deadline)
        return memory

    def release(self) -> None:
        """Say that the memory is not used any more."""
        self._budget.give(self._held)
        self._held = 0


def discard(channel: Channel, count: int, deadline: float | None = None) -> None:
    """Read a payload and keep nothing of it.

    Raises:
        FrameError: If a checksum is wrong.
        OSError: If the connection breaks or `deadline` passes.
    """
    scratch: Bytes = np.empty(min(count, CHUNK_BYTES), np.uint8)
    while count:
        chunk = scratch[: min(count, CHUNK_BYTES)]
        _read_checked(channel, chunk, deadline)
        count -= len(chunk)


def _read_checked(channel: Channel, chunk: Bytes, deadline: float | None) -> None:
    channel.fill(chunk.data, deadline)
    checksum = bytearray(CHECKSUM_BYTES)
    channel.fill(memoryview(checksum), deadline)
    if not frame.checksum_holds(chunk, checksum):
        raise FrameError("the checksum of a payload is wrong")
