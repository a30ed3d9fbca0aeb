"""`SessionClient`: pushes to a server of this process as frames over a socket, which its session answers.

The frames are made before they are timed, and whoever pushes runs the session too, which the native core does without
Python's lock: so what is timed is the server's work, and no client competes with it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import numpy as np

from benchmarks.engine_client import PushPart
from phalanx._core import AttachedSegments, DataSession, MemoryBudget, ServerContext
from phalanx.ps.server.service import Service
from phalanx.ps.wire import frame
from phalanx.ps.wire.data_frame import DataRequest
from phalanx.ps.wire.frame import Bytes, FrameKind
from phalanx.ps.wire.segments import SMALLEST_SHARED, SharedSegment

_BATCH = 64
"""Frames on their way at a time: a socket of any system has room for as many, and for their answers."""

_AHEAD_BYTES = 1 << 16  # as a channel reads


class SessionClient:
    """A worker that declared its tables, and its session on the server.

    Args:
        service: Of which server, in mode `async`.
        client: Its number.
    """

    def __init__(self, service: Service, client: int) -> None:
        budget = MemoryBudget(1 << 30)
        self._context = ServerContext(service.engine, "server 0", 1 << 30, budget, print)
        self._segments = AttachedSegments()
        self._session = DataSession(self._context, self._segments, client, f"worker {client}")
        self._ours, self._theirs = socket.socketpair()
        self._client, self._step = client, 0
        self._shared: dict[int, SharedSegment] = {}
        self._end = frame.encode_raw(FrameKind.REQUEST, 0, client, 0, b"", 0)
        """Comes behind a batch: a session leaves it to Python."""

    def batches(self, pushes: Sequence[PushPart], count: int) -> list[bytes]:
        """Return the frames of the next pushes, which repeat those given."""
        frames = [self._frame(pushes[number % len(pushes)]) for number in range(count)]
        return [b"".join((*frames[at : at + _BATCH], self._end)) for at in range(0, count, _BATCH)]

    def push(self, batch: bytes) -> None:
        """Push a batch."""
        self._ours.sendall(batch)
        ahead: Bytes = np.empty(_AHEAD_BYTES, np.uint8)
        self._session.serve(self._theirs.fileno(), True, ahead, 0, 0, [])
        answer = frame.decode_header(self._ours.recv(1 << 20)[: frame.HEADER_BYTES])
        if answer.kind is not FrameKind.REPLY:
            raise RuntimeError(f"the server answers a push with {answer.kind.name}")

    def close(self) -> None:
        """Close the socket."""
        self._ours.close()
        self._theirs.close()

    def _frame(self, push: PushPart) -> bytes:
        part, payload = push
        segment = self._segment(payload) if len(payload) >= SMALLEST_SHARED else None
        raw = DataRequest(FrameKind.PUSH, part, self._step).encode(segment)
        seq = self._step + 2  # 1 declared the tables
        self._step += 1
        flags = 0 if segment is None else frame.SHARED
        head = frame.encode_raw(FrameKind.PUSH, flags, self._client, seq, raw, len(payload))
        return head if segment else b"".join((head, *frame.chunks(frame.layout_of([payload]), [payload])))

    def _segment(self, payload: Bytes) -> SharedSegment:
        """Return the segment with a payload, handed over before."""
        if id(payload) not in self._shared:
            segment = SharedSegment(len(self._shared) + 1, len(payload))
            segment.memory[:] = payload
            assert segment.descriptor is not None
            self._segments.attach(segment.number, segment.size, os.dup(segment.descriptor))
            segment.forget_descriptor()
            self._shared[id(payload)] = segment
        return self._shared[id(payload)]
