"""`SegmentPool`: shared-memory segments for requests between processes of one host.

The client makes the segments and hands each over once, as a descriptor. A request's arrays lie at the start of one and
the reply's after them, so nothing goes through a socket but the header. The client takes a segment for another request
when nothing of its own refers to it any more: neither the request nor an array of the reply. The server maps what came
in `csrc/wire_segments.h`.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import threading
from collections import deque

import numpy as np
from numpy.typing import DTypeLike

from phalanx.ps.wire.frame import Array, Bytes, aligned

_log = logging.getLogger("phalanx.ps.wire")

SMALLEST_SHARED = 8 << 10
"""Below so many bytes a payload goes through the socket: handing over memory costs more."""

_SMALLEST, _LARGE, _LARGEST = 1 << 16, 64 << 20, 1 << 30  # the largest that csrc/wire_segments.cc maps
_MOST_PER_SIZE, _MOST_LARGE = 8, 2
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedSegment:
    """One piece of memory that the client owns; its size never changes."""

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size
        self.descriptor: int | None = os.memfd_create("phalanx-segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, size)
            # Without this seal a client could cut the memory off under a server that reads it, which kills the server.
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self.memory = _mapped(self.descriptor, size)
        except OSError:
            self.forget_descriptor()
            raise
        self.array_interface = {
            "version": 3,
            "data": (self.memory.ctypes.data, False),
            "typestr": "|u1",
            "shape": (size,),
        }
        """What NumPy shows as the memory of a lease."""

    def forget_descriptor(self) -> None:
        """Close the descriptor; the memory stays."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def __del__(self) -> None:
        if getattr(self, "descriptor", None) is not None:
            self.forget_descriptor()


class SegmentLease:
    """The use of a segment for one request; it ends with the last reference to this object or a view of its memory."""

    __slots__ = ("__array_interface__", "_pool", "segment")

    def __init__(self, segment: SharedSegment, pool: SegmentPool) -> None:
        self.segment = segment
        self._pool = pool
        # numpy keeps the object that shows this alive for as long as any view of the memory, torch tensors included.
        self.__array_interface__ = segment.array_interface

    @property
    def memory(self) -> Bytes:
        """Return the whole memory as bytes that keep the lease."""
        return np.asarray(self)

    def __del__(self) -> None:
        self._pool.give_back(self.segment)


class SegmentPool:
    """The segments of one connection, on the client."""

    def __init__(self) -> None:
        self._free: dict[int, deque[SharedSegment]] = {}
        self._counts: dict[int, int] = {}
        self._lock = threading.Lock()

    def lease(self, size: int) -> SegmentLease | None:
        """Return memory of at least `size` bytes; None if it is too large, or too many of that size are in use.

        Segments are kept for the next request: their pages are there already, and new ones cost ten times a copy.
        """
        rounded = max(_SMALLEST, 1 << (size - 1).bit_length())
        if rounded > _LARGEST:
            return None
        with self._lock:
            if free := self._free.get(rounded):
                return SegmentLease(free.pop(), self)
            if self._counts.get(rounded, 0) >= (_MOST_PER_SIZE if rounded <= _LARGE else _MOST_LARGE):
                return None
            try:
                segment = SharedSegment(sum(self._counts.values()) + 1, rounded)
            except OSError as error:
                _log.warning("no shared memory of %s bytes (%s): arrays go through the socket", rounded, error.strerror)
                return None
            self._free.setdefault(rounded, deque())
            self._counts[rounded] = self._counts.get(rounded, 0) + 1
            return SegmentLease(segment, self)

    def give_back(self, segment: SharedSegment) -> None:
        """Take a segment whose lease ended. Runs whenever Python drops an object, so it takes no lock."""
        self._free[segment.size].append(segment)


class ReplyBuffer:
    """Memory that the client set aside for the reply; arrays made in it are not copied on their way back."""

    __slots__ = ("_used", "memory")

    def __init__(self, memory: Bytes | None) -> None:
        self.memory = memory
        self._used = 0

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> Array:
        """Return an uninitialised array, in the client's memory as long as that has room."""
        array: Array = np.empty(0, dtype)
        sizes = (shape,) if isinstance(shape, int) else shape
        count = int(np.prod(sizes, dtype=np.int64)) * array.dtype.itemsize
        if self.memory is None or self._used + count > len(self.memory):
            return np.empty(shape, dtype)
        start, self._used = self._used, aligned(self._used + count)
        return self.memory[start : start + count].view(array.dtype).reshape(shape)


def _mapped(descriptor: int, size: int) -> Bytes:
    return np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
