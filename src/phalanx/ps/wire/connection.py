"""The client's end: requests go out without waiting, replies come back in their order."""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from phalanx import errors
from phalanx.errors import ClosedError, ConfigError, InternalError, PeerLostError, PhalanxError
from phalanx.ps.wire import frame
from phalanx.ps.wire import secret as handshake
from phalanx.ps.wire.frame import Array, FrameError, Header, Kind, Layout
from phalanx.ps.wire.link import Link, Placed, open_link, reply_memory
from phalanx.ps.wire.message import Reply
from phalanx.ps.wire.receive import Budget, Incoming, read_head

_log = logging.getLogger("phalanx.ps.wire")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
_READER_ENDS_S = 15.0
_SAY_FIRST_S, _SAY_S = 5.0, 30.0


class Pending:
    """A request under way."""

    def __init__(self, connection: Connection, op: str, meta: Mapping[str, Any], arrays: Sequence[Array]) -> None:
        self.op = op
        self.layout: Layout = frame.layout_of(arrays)
        self._connection = connection
        self._meta = meta
        self.arrays = arrays
        self.reply_bytes = 0
        self.seq = 0
        self.placed: Placed | None = None
        self.waits_for = ""
        self.sent_at = self.deadline = 0.0
        self.outcome: Reply | PhalanxError | None = None

    def result(self) -> Reply:
        """Wait for the reply.

        Raises:
            PhalanxError: The one that the server raised, of the same class.
            PeerLostError: If the server is gone, or is silent until the deadline.
            ClosedError: If the connection was closed first.
        """
        return self._connection._wait_for(self)

    def content(self) -> dict[str, Any]:
        """Return the object of the request's frame."""
        return {"op": self.op, "meta": self._meta}


class Connection:
    """A way to one server that keeps the order of requests, for any number of threads.

    Args:
        endpoint: `host:port` of the server. On the server's own host a Unix socket and shared memory are used.
        secret: The job's secret.
        me: Who this process is, as `worker 1`.
        peer: Who the server must be, as `server 0`.
        timeout_s: Longest silence of the server while a reply is due. A server that waits for other workers says so
            every few seconds, and while they live its reply is not late.
        connect_s: Longest wait for the server to come up.
        retry_s: How long to connect again after the connection is lost or the server fell silent, sending again what
            was not answered; a request then costs a copy of its arrays. 0: a lost connection is an error at once.
        client: Number of this client, the same for the life of the process; made when None.
        log_file: The server's log, for messages.
        max_unanswered_bytes: `send` waits while more than this is on its way; one request alone may be larger.

    Raises:
        ConfigError: If the endpoint is wrong, or something else than that server of this job and version answers.
        PeerLostError: If nothing answers within `connect_s`.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        secret: bytes,
        me: str,
        peer: str,
        timeout_s: float = 60.0,
        connect_s: float = 60.0,
        retry_s: float = 0.0,
        client: int | None = None,
        log_file: str = "",
        max_unanswered_bytes: int = 64 << 20,
    ) -> None:
        self.client = secrets.randbits(64) if client is None else client
        self._endpoint, self._secret, self._me, self._peer, self._log_file = endpoint, secret, me, peer, log_file
        self._timeout_s, self._retry_s, self._max_unanswered_bytes = timeout_s, retry_s, max_unanswered_bytes
        self._changed = threading.Condition()
        self._unanswered: deque[Pending] = deque()
        self._unanswered_bytes = 0
        self._failure = ""
        self._silence = ""
        self._said_at = -math.inf
        self._closed = False
        self._give_up_at: float | None = None
        # Held while requests get their numbers and are written, and while the link is replaced.
        self._writing = threading.Lock()
        self._seq = 0
        started = time.monotonic()
        try:
            self._link = self._connect(started + connect_s)
        except OSError as error:
            raise self._lost("connect", started, f"{_words(error)}. Start it, or correct the address") from None
        self._linked_again_at = -math.inf
        self._reader = self._read_in_thread(self._link)

    def send(self, op: str, meta: Mapping[str, Any], arrays: Sequence[Array] = (), reply_bytes: int = 0) -> Pending:
        """Send a request and return without its reply.

        Waits while more than `max_unanswered_bytes` are on their way. Without shared memory it also waits until the
        socket took the request: a server reads the next one when it has answered those before.

        Args:
            op: What is asked.
            meta: Any JSON object.
            arrays: Arrays of the types in `frame.DTYPES`. The caller may change them when this returns.
            reply_bytes: Room for the arrays of the reply in shared memory; a reply that does not fit goes through the
                socket.

        Raises:
            PeerLostError: If the server is gone, or takes no request before the deadline.
            ClosedError: If this connection was closed.
        """
        pending = Pending(self, op, meta, [np.asarray(array, order="C") for array in arrays])
        pending.reply_bytes = reply_bytes
        pending.sent_at = time.monotonic()
        self._reserve(pending)
        if not self._writing.acquire(timeout=self._timeout_s + self._retry_s):
            self._unreserve(pending)
            raise self._lost(op, pending.sent_at, "another request could not be written")
        try:
            self._send(pending)
        finally:
            self._writing.release()
        return pending

    def call(self, op: str, meta: Mapping[str, Any], arrays: Sequence[Array] = (), reply_bytes: int = 0) -> Reply:
        """Send a request and wait for its reply; see `send` and `Pending.result`."""
        return self.send(op, meta, arrays, reply_bytes).result()

    def close(self) -> None:
        """End the connection; requests without an answer raise `ClosedError`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            link = self._link
        link.channel.interrupt()
        # Whoever writes, or replaces the link, leaves first.
        if self._writing.acquire(timeout=_READER_ENDS_S):
            reader = self._reader
            self._writing.release()
            reader.join(_READER_ENDS_S)

    def _reserve(self, pending: Pending) -> None:
        size = pending.layout.payload_bytes
        deadline = pending.sent_at + self._timeout_s
        with self._changed:
            while self._unanswered_bytes and self._unanswered_bytes + size > self._max_unanswered_bytes:
                self._require_alive(pending)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self._lost(pending.op, pending.sent_at, f"{self._unanswered_bytes:,} bytes before it wait")
                self._changed.wait(left)
            self._unanswered_bytes += size

    def _unreserve(self, pending: Pending) -> None:
        with self._changed:
            self._unanswered_bytes -= pending.layout.payload_bytes
            self._changed.notify_all()

    def _require_alive(self, pending: Pending) -> None:
        if self._closed:
            raise ClosedError(f"the connection to {self._peer} is closed; {pending.op!r} was not sent.")
        if self._failure:
            raise self._lost(pending.op, pending.sent_at, self._failure)

    def _send(self, pending: Pending) -> None:
        """Number a request, remember it and write it. Runs with `_writing` held."""
        try:
            pending.seq = self._seq + 1
            self._place(pending)
            with self._changed:
                self._require_alive(pending)
                self._seq = pending.seq
                pending.deadline = time.monotonic() + self._timeout_s
                self._unanswered.append(pending)
        except BaseException:
            self._unreserve(pending)
            raise
        self._write(self._link, pending)
        # What the caller gave is the caller's again when `send` returns. A shared request is kept in its segment.
        keep = self._retry_s and pending.placed is not None and pending.placed.lease is None
        pending.arrays = [array.copy() for array in pending.arrays] if keep else ()

    def _place(self, pending: Pending) -> None:
        arrays = pending.arrays
        if pending.placed is not None and (memory := pending.placed.request_memory) is not None:
            arrays = pending.layout.read(memory)
        pending.placed = self._link.place(
            self.client, pending.seq, pending.content(), pending.layout, arrays, pending.reply_bytes
        )

    def _write(self, link: Link, pending: Pending) -> None:
        assert pending.placed is not None
        try:
            link.write(pending.placed, time.monotonic() + self._timeout_s)
        except TimeoutError:
            with self._changed:
                self._give_up_link("it does not take requests")
        except OSError:
            # The reader of this link sees the same, and either connects again or says that the server is lost.
            link.channel.interrupt()

    def _wait_for(self, pending: Pending) -> Reply:
        with self._changed:
            while pending.outcome is None:
                left = pending.deadline - time.monotonic()
                if left <= 0:
                    others = f"; it waits for {pending.waits_for}" if pending.waits_for else ""
                    self._give_up_link(f"it did not answer in time{others}")
                else:
                    self._changed.wait(left)
            outcome = pending.outcome
        if isinstance(outcome, PhalanxError):
            raise outcome
        return outcome

    def _give_up_link(self, why: str) -> None:
        """Take a silent server for lost. Runs with `_changed` held.

        What it may still answer comes over a link that nobody reads any more, so with `retry_s` a new link is as good
        as after a loss.
        """
        if not self._retry_s:
            self._fail(why)
            return
        self._silence = why
        for pending in self._unanswered:
            pending.deadline = time.monotonic() + self._retry_s + self._timeout_s
        self._link.channel.interrupt()

    def _read_in_thread(self, link: Link) -> threading.Thread:
        reader = threading.Thread(target=self._read, args=(link,), name=f"replies of {self._peer}", daemon=True)
        reader.start()
        return reader

    def _read(self, link: Link) -> None:
        try:
            while True:
                self._take_reply(link)
        except (OSError, FrameError) as error:
            why, self._silence = self._silence or _words(error), ""
        link.channel.interrupt()
        with self._writing:
            link.channel.close()
            with self._changed:
                over = self._closed or bool(self._failure)
                if over or not self._retry_s:
                    self._fail(why)
                    return
            self._connect_again(why)

    def _take_reply(self, link: Link) -> None:
        header, content = read_head(link.channel)
        with self._changed:
            pending = self._unanswered[0] if self._unanswered else None
        if pending is None or header.seq != pending.seq or header.kind == Kind.REQUEST:
            raise FrameError(f"a {header.kind.name.lower()} to request {header.seq}, which is not the next")
        if header.kind == Kind.WAITING:
            self._keep_waiting(pending, str(content.get("for")), is_here=content.get("here") is True)
            return
        outcome = self._outcome(link, pending, header, content)
        with self._changed:
            if self._unanswered and self._unanswered[0] is pending:
                self._unanswered.popleft()
                self._unanswered_bytes -= pending.layout.payload_bytes
                self._give_up_at = None
                _settle(pending, outcome)
                self._changed.notify_all()

    def _keep_waiting(self, pending: Pending, waits_for: str, *, is_here: bool) -> None:
        now = time.monotonic()
        with self._changed:
            pending.waits_for = waits_for
            for each in self._unanswered if is_here else ():
                each.deadline = now + self._timeout_s
        if now - max(pending.sent_at, self._said_at) >= _SAY_S:
            self._said_at = now
            _log.info("%s waits for %s, which waits for %s", self._me, self._peer, waits_for)

    def _outcome(self, link: Link, pending: Pending, header: Header, content: dict[str, Any]) -> Reply | PhalanxError:
        if header.kind == Kind.ERROR:
            return _raised(content, self._peer)
        layout = frame.layout_from(content.get("arrays"))
        if layout.payload_bytes != header.payload_bytes:
            raise FrameError(f"a payload of {header.payload_bytes} bytes for arrays of {layout.payload_bytes}")
        if header.flags & frame.SHARED:
            assert pending.placed is not None
            memory = reply_memory(pending.placed, content.get("at"), layout.payload_bytes)
        else:
            received = Incoming(link.channel, Budget(frame.LARGEST_PAYLOAD * 2)).receive(layout.payload_bytes)
            assert received is not None
            memory = received
        return Reply(content.get("meta") or {}, layout.read(memory))

    def _connect_again(self, why: str) -> None:
        """Replace the link and send again what was not answered. Runs with `_writing` held, in the old link's reader.

        The new link's reader starts first: while requests are written again their replies must be taken, or both ends
        could wait for each other with full buffers.
        """
        started = time.monotonic()
        with self._changed:
            until = self._give_up_at = self._give_up_at or started + self._retry_s
            for pending in self._unanswered:
                pending.deadline = until + self._timeout_s
            self._changed.notify_all()
        _log.warning("%s lost %s at %s (%s); connecting again", self._me, self._peer, self._endpoint, why)
        try:
            # A server that ends each connection at once is not asked more often than one that is away.
            self._pause(max(0.0, self._linked_again_at + _LONGEST_PAUSE_S - started))
            if time.monotonic() >= until:
                raise TimeoutError("it answers on no connection")
            link = self._connect(until)
        except (OSError, PhalanxError) as error:
            with self._changed:
                self._fail(f"{why}, and for {time.monotonic() - started:.1f} s not again: {_words(error)}")
            return
        with self._changed:
            self._link, self._linked_again_at = link, time.monotonic()
            again = list(self._unanswered)
            if self._closed:
                link.channel.interrupt()
        self._reader = self._read_in_thread(link)
        for pending in again:
            self._place(pending)
            pending.deadline = time.monotonic() + self._timeout_s
            self._write(link, pending)
        with self._changed:
            self._give_up_at = self._give_up_at if self._unanswered else None
            self._changed.notify_all()

    def _connect(self, until: float) -> Link:
        mine = handshake.greeting(self._me, self.client)
        pause, say_at = _FIRST_PAUSE_S, time.monotonic() + _SAY_FIRST_S
        while True:
            try:
                return open_link(self._endpoint, key=self._secret, mine=mine, peer=self._peer, until=until)
            except ConfigError as error:
                text = str(error).rstrip(".")
                raise ConfigError(f"{self._me} cannot use {self._peer} at {self._endpoint}: {text}.") from None
            except OSError as error:
                now = time.monotonic()
                if now + pause >= until:
                    raise
                if now >= say_at:
                    _log.info("%s: waiting for %s at %s (%s)", self._me, self._peer, self._endpoint, _words(error))
                    say_at = now + _SAY_FIRST_S
            self._pause(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _pause(self, seconds: float) -> None:
        with self._changed:
            if self._changed.wait_for(lambda: self._closed, seconds):
                raise ClosedError("it was closed here")

    def _fail(self, why: str) -> None:
        """End the connection for good: every request without an answer fails. Runs with `_changed` held."""
        self._failure = self._failure or why
        for pending in self._unanswered:
            if self._closed:
                _settle(pending, ClosedError(f"the connection to {self._peer} was closed before the answer."))
            else:
                _settle(pending, self._lost(pending.op, pending.sent_at, self._failure))
        self._unanswered.clear()
        self._unanswered_bytes = 0
        self._link.channel.interrupt()
        self._changed.notify_all()

    def _lost(self, op: str, since: float, why: str) -> PeerLostError:
        waited = time.monotonic() - since
        look = f" Its log: {self._log_file}" if self._log_file else ""
        where = self._link.where if hasattr(self, "_link") else self._endpoint
        return PeerLostError(
            f"{self._me} asked {self._peer} at {where} for {op!r} and waited {waited:.1f} s: {why}.{look}"
        )


def _settle(pending: Pending, outcome: Reply | PhalanxError) -> None:
    """Give a request its outcome and let go of what it was made of."""
    pending.outcome = outcome
    pending.placed = None
    pending.arrays = ()


def _raised(content: dict[str, Any], peer: str) -> PhalanxError:
    """Return the error that a server reports, as the class it had there."""
    name, message = str(content.get("error")), str(content.get("message"))
    found = getattr(errors, name, None)
    if isinstance(found, type) and issubclass(found, PhalanxError):
        return found(message)
    return InternalError(f"{peer} failed with {name}: {message}")


def _words(error: Exception) -> str:
    """Return what an error says, without its number."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
