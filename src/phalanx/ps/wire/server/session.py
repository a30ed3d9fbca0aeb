"""`Session`: the server's side of one client connection."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from phalanx.errors import BackendError, ClosedError, ConfigError, InternalError, PhalanxError
from phalanx.ps.wire import frame, secret
from phalanx.ps.wire.channel import Channel, Part
from phalanx.ps.wire.frame import Array, Bytes, FrameError, FrameKind, Header, PayloadLayout
from phalanx.ps.wire.message import Handler, RpcReply, RpcRequest
from phalanx.ps.wire.progress import WORK_REPORT_S, Startup, WorkReporter
from phalanx.ps.wire.segments import ReplyBuffer
from phalanx.versions import HAS_NATIVE

if HAS_NATIVE:
    from phalanx import _core
    from phalanx._core import MemoryBudget, ServerContext

_log = logging.getLogger("phalanx.ps.wire")
_LONGEST_MESSAGE = 1 << 16
_SHORT_START_S = 1.0
"""A start that takes no longer is not worth a word."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What every session of a listener shares."""

    key: bytes = field(repr=False)
    me: str
    handler: Handler
    max_frame_bytes: int
    budget: MemoryBudget
    handshake_s: float
    context: ServerContext
    """What the native core needs to answer pulls and pushes."""

    startup: Startup
    """What happens before requests are answered."""

    stopping: threading.Event
    """Set when no session begins another request; the context is stopped then too."""

    opened: Callable[[int], None]
    """Called with the client's number when its requests begin to be answered."""

    closed: Callable[[int], None]
    """Called with the client's number when such a connection ended."""


class Session:
    """A connection from its first byte to its last."""

    def __init__(self, channel: Channel, where: str, config: ServerConfig) -> None:
        self.channel = channel
        self.admitted = False
        self._is_open = False
        self._where = where
        self._config = config
        self._segments = _core.AttachedSegments()
        self._peer = ""
        self._client = 0
        self._payload_bytes = 0
        """Bytes of the request under way that count in the budget."""

    def run(self, refuse: Callable[[str, str], None]) -> None:
        """Serve until the client leaves, or breaks the rules; then `refuse(who, why)` is called."""
        try:
            self._admit()
            if not self._await_start():
                return
            self._config.opened(self._client)
            self._is_open = True
            data = _core.DataSession(self._config.context, self._segments, self._client, self._peer)
            while self.channel.serve(data) and not self._config.stopping.is_set():
                self._serve_request()
        except (ConfigError, FrameError) as error:
            refuse(self._where, f"{error} (it is {self._peer})" if self._peer else str(error))
        except OSError as error:
            if not self.admitted:
                refuse(self._where, f"left in the handshake: {error}")
        finally:
            self.channel.close()
            self._segments = _core.AttachedSegments()
            if self._is_open:
                self._config.closed(self._client)

    def leave(self) -> None:
        """End the wait for the next request; the one that is being answered ends as usual."""
        self.channel.interrupt(socket.SHUT_RD)

    def _admit(self) -> None:
        config = self._config
        deadline = time.monotonic() + config.handshake_s
        binding = self.channel.secure(deadline)
        local = secret.greeting(config.me)
        remote = secret.admit(self.channel, local, secret=config.key, binding=binding, deadline=deadline)
        self._peer, self._client, self.admitted = remote.name, remote.client, True

    def _await_start(self) -> bool:
        """Tell the client how far the server's start is until that is over; returns whether requests are answered then.

        None is read meanwhile, so they take no memory here.
        """
        startup, reporter = self._config.startup, WorkReporter(self._send_work)
        is_over = startup.wait(_SHORT_START_S)
        was_reported = not is_over
        while not is_over and not self._config.stopping.is_set():
            reporter.report(startup.progress)
            is_over = startup.wait(WORK_REPORT_S)
        if startup.failure is not None:
            self.channel.send([_encode_error(0, startup.failure)])
        elif is_over and was_reported:
            self._send_work("", True)
        return is_over and startup.failure is None

    def _serve_request(self) -> None:
        header, raw = self.channel.read_head()
        if header.kind not in frame.REQUEST_KINDS:
            raise FrameError(f"a {header.kind.name.lower()} where a request was due")
        try:
            is_control = header.kind == FrameKind.REQUEST
            parts = self._answer(header, frame.parse_object(raw)) if is_control else self._answer_data(header, raw)
        except PhalanxError as error:
            parts = [_encode_error(header.seq, error)]
        finally:
            self._config.budget.give(self._payload_bytes)
            self._payload_bytes = 0
        self.channel.send(parts)

    def _answer(self, header: Header, content: dict[str, Any]) -> list[Part]:
        """Return the reply to a request as it is written.

        Raises:
            PhalanxError: What the handler raises, or why the request was not given to it.
            FrameError: If the request makes no sense, so that nothing after it does.
        """
        op, meta, layout = _parse_request(header, content)
        shared = self._shared_memory(header, content, layout)
        payload = self._read_payload(op, layout.payload_bytes) if shared is None else shared
        after = frame.aligned(layout.payload_bytes)
        reply_buffer = ReplyBuffer(None if shared is None else shared[after:])
        arrays = layout.read(payload)
        report_wait = partial(self._report_wait, header.seq)
        request = RpcRequest(
            op, meta, arrays, self._client, header.seq, self._peer, reply_buffer, report_wait, self._report_work
        )
        try:
            return self._encode_reply(request, self._config.handler(request), after)
        except PhalanxError:
            raise
        except Exception as error:
            _log.exception("%s failed at %r of %s", self._config.me, op, self._peer)
            raise InternalError(f"{self._config.me} failed at {op!r} with {error!r}. Its log has more.") from error

    def _encode_reply(self, request: RpcRequest, reply: RpcReply, after: int) -> list[Part]:
        """Return a reply's bytes; its arrays stay in the client's memory, after those of the request, if they fit."""
        arrays = [np.asarray(array, order="C") for array in reply.arrays]
        layout = frame.layout_of(arrays)
        content: dict[str, Any] = {"meta": reply.meta, "arrays": layout.describe()}
        memory = request.reply_buffer.memory
        if memory is None or layout.payload_bytes > len(memory):
            head = frame.encode(FrameKind.REPLY, 0, request.client, request.seq, content, layout.payload_bytes)
            return [head, *self._chunks(layout, arrays)]
        layout.write(_copy_overlapping(arrays, layout, memory), memory)
        content["at"] = after
        return [frame.encode(FrameKind.REPLY, frame.SHARED, request.client, request.seq, content, layout.payload_bytes)]

    def _chunks(self, layout: PayloadLayout, arrays: list[Array]) -> list[memoryview | bytes]:
        return frame.chunks(layout, arrays, has_checksums=self.channel.has_checksums)

    def _answer_data(self, header: Header, raw: bytearray) -> list[Part]:
        """Return the reply to a pull or push that the native core did not read itself. Raises as `_answer`."""
        if header.flags:
            raise FrameError("a pull or push in shared memory that this connection has none of")
        payload = self._read_payload(header.kind.name.lower(), header.payload_bytes)
        report_wait = partial(self._report_wait, header.seq)
        context = self._config.context
        kind, raw_reply, rows = context.answer(
            self._peer, self._client, header.kind, header.seq, bytes(raw), payload, report_wait
        )
        head = frame.encode_raw(FrameKind(kind), 0, self._client, header.seq, raw_reply, len(rows))
        return [head, *(self._chunks(frame.layout_of([rows]), [rows]) if len(rows) else ())]

    def _report_wait(self, seq: int, waits_for: str, is_connected: bool) -> None:
        content = {"for": waits_for, "here": is_connected}
        try:
            self.channel.send([frame.encode(FrameKind.WAITING, 0, self._client, seq, content, 0)])
        except OSError as error:
            raise ClosedError(f"{self._peer} went while {self._config.me} waited for {waits_for}: {error}.") from error

    def _report_work(self, does: str, has_moved: bool) -> None:
        try:
            self._send_work(does, has_moved)
        except OSError as error:
            raise ClosedError(f"{self._peer} went while {self._config.me} {does}: {error}.") from error

    def _send_work(self, does: str, has_moved: bool) -> None:
        content = {"does": does, "moved": has_moved}
        self.channel.send([frame.encode(FrameKind.WAITING, 0, self._client, 0, content, 0)])

    def _shared_memory(self, header: Header, content: dict[str, Any], layout: PayloadLayout) -> Bytes | None:
        if not header.flags & frame.SHARED:
            return None
        match content.get("segment"):
            case [int(number), int(size)] if 0 <= number < 1 << 64 and 0 <= size < 1 << 64:
                pass
            case other:
                raise FrameError(f"a segment is described as {str(other)[:80]}")
        memory: Bytes
        if header.flags & frame.NEW_SEGMENT:
            memory = self._segments.attach(number, size, self.channel.take_descriptor())
        else:
            memory = self._segments.find(number)
        if layout.payload_bytes > len(memory):
            raise FrameError(f"arrays of {layout.payload_bytes} bytes in a segment of {len(memory)}")
        return memory

    def _read_payload(self, op: str, count: int) -> Bytes:
        config = self._config
        if count > config.max_frame_bytes:
            self.channel.discard_payload(count)
            raise ConfigError(
                f"{op!r} of {self._peer} brings {count:,} bytes; {config.me} takes {config.max_frame_bytes:,} at once. "
                "Send fewer rows at a time."
            )
        payload = self.channel.read_payload(count, reserve=self._reserve)
        if payload is None:
            raise BackendError(
                f"{op!r} of {self._peer} brings {count:,} bytes; {config.me} holds all it may ({config.budget.limit:,} "
                "bytes). Use more servers, or smaller batches."
            )
        return payload

    def _reserve(self, count: int) -> bool:
        fits = self._config.budget.take(count)
        self._payload_bytes += count if fits else 0
        return fits


def _parse_request(header: Header, content: dict[str, Any]) -> tuple[str, dict[str, Any], PayloadLayout]:
    op, meta = content.get("op"), content.get("meta")
    if not isinstance(op, str) or not isinstance(meta, dict):
        raise FrameError("a request without operation")
    return op, meta, frame.layout_from(content.get("arrays"), header.payload_bytes)


def _copy_overlapping(arrays: list[Array], layout: PayloadLayout, memory: Bytes) -> list[Array]:
    """Copy arrays that lie in the reply buffer, at another place than they go to: writing others could change them."""
    return [
        array.copy() if np.may_share_memory(array, memory) and array.ctypes.data != target.ctypes.data else array
        for array, target in zip(arrays, layout.read(memory), strict=True)
    ]


def _encode_error(seq: int, error: PhalanxError) -> bytes:
    content = {"error": type(error).__name__, "message": str(error)[:_LONGEST_MESSAGE]}
    return frame.encode(FrameKind.ERROR, 0, 0, seq, content, 0)
