"""`Connection`: RPC client connection with pipelined requests and reconnects."""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from phalanx.errors import ClosedError, PeerLostError, PhalanxError
from phalanx.ps.wire.channel import Channel, error_text
from phalanx.ps.wire.client.dial import LONGEST_PAUSE_S, Dialer, Patience
from phalanx.ps.wire.client.lending import LentLink
from phalanx.ps.wire.client.link import InFlight, ServerLink
from phalanx.ps.wire.frame import Array
from phalanx.ps.wire.message import ControlRequest, Pending, RpcReply, WireRequest

_log = logging.getLogger("phalanx.ps.wire")
_READER_ENDS_S = 15.0
_LOG_EVERY_S = 30.0
_LOG_WORK_EVERY_S = 15.0

_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


class ServersMovedError(PeerLostError):
    """A request has no answer, for the job has another number of servers now; those have what was done, and no more."""


class Connection:
    """A way to one server that keeps the order of requests, for any number of threads.

    Args:
        endpoint: `host:port` of the server. On the server's own host a Unix socket and shared memory are used.
        secret: The job's secret.
        me: Who this process is, as `worker 1`.
        peer: Who the server must be, as `server 0`.
        timeout_s: Longest silence of the server while a reply is due. A server that waits for other workers reports it
            every few seconds, and while they live its reply is not late; nor is it while the server's own work runs.
        connect_s: Longest wait for the server to come up.
        retry_s: How long to connect again after the connection is lost or the server fell silent, sending again what
            was not answered. 0: a lost connection is an error at once. A server that recovers is not away: the time
            counts from its last progress.
        client: Number of this client, the same for the life of the process; made when None.
        max_unanswered_bytes: `send` waits while more than this is on its way; one request alone may be larger.
        has_moved: Whether the job has other servers by now: one that is away is asked no more then, and requests
            without an answer raise `ServersMovedError`.
        lock: Shared by connections whose links are lent to one `Borrower`; of its own when None.

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
        max_unanswered_bytes: int = 64 << 20,
        has_moved: Callable[[], bool] = lambda: False,
        lock: threading.RLock | None = None,
    ) -> None:
        self.client = secrets.randbits(64) if client is None else client
        self._dialer = Dialer(endpoint, secret, me, self.client, peer)
        self._me, self._peer = me, peer
        self._timeout_s, self._retry_s, self._has_moved = timeout_s, retry_s, has_moved
        self._lock = threading.RLock() if lock is None else lock
        self._changed = threading.Condition(self._lock)
        self._in_flight = InFlight(max_unanswered_bytes)
        self._failure = self._timeout_reason = ""
        self._logged_at = self._work_logged_at = self._progress_at = -math.inf
        self._closed = False
        self._patience = Patience(retry_s)
        # Held while requests get their numbers and are written, and while the link is replaced.
        self._writing = threading.Lock()
        self._seq = 0
        started = time.monotonic()
        try:
            channel, where = self._dialer.connect(started + connect_s, self._pause)
        except OSError as error:
            why = f"{error_text(error)}. Start it, or correct the address"
            raise self._lost("connect", started, why, endpoint) from None
        self._reconnected_at = -math.inf
        self.link = self._link_over(channel, where)
        """The way to the server now; it is replaced when it is lost."""

        self.link.thread.start()
        _connections.add(self)

    def oldest_request(self) -> tuple[str, Pending] | None:
        """Return the server and the request that has waited longest for its answer, or None when none waits."""
        with self._lock:
            self._take_back()
            first = self._in_flight.first
        return None if first is None else (self._peer, first)

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
        return self.post(ControlRequest(op, meta, [np.asarray(array, order="C") for array in arrays], reply_bytes))

    def post(self, request: WireRequest) -> Pending:
        """Send a request of any kind and return without its reply; see `send`."""
        pending = Pending(request, self._wait_for)
        op = pending.op
        pending.sent_at = time.monotonic()
        self._reserve(pending)
        longest_s = self._timeout_s + self._retry_s
        while not self._writing.acquire(timeout=longest_s):
            if time.monotonic() - self._progress_at > longest_s:
                self._unreserve(pending)
                raise self._lost(op, pending.sent_at, "another request could not be written")
        try:
            self._send(pending)
        finally:
            self._writing.release()
        return pending

    def fail(self, request: WireRequest, error: PhalanxError) -> Pending:
        """Return a request that could not be sent as one whose answer is the error."""
        pending = Pending(request, self._wait_for)
        pending.settle(error)
        return pending

    def lend(self) -> LentLink | None:
        """Return what a borrower needs, who sets `link.borrower` then. Runs with the lock held, as does `get_back`.

        None over TLS and TCP, while anybody writes or reads here, and where the link is lost.
        """
        link = self.link
        if self._closed or self._failure or link.pool is None or not link.is_free or self._writing.locked():
            return None
        due = [(pending.seq, pending.reply_bytes) for pending in self._in_flight]
        channel = link.channel
        place = (channel.fileno(), *channel.read_ahead(), self.client, self._seq)
        return LentLink(*place, self._in_flight.room, due, self._writing)

    def get_back(
        self, seq: int, ahead: tuple[int, int], unanswered: Sequence[Pending], *, has_answered: bool, is_read: bool
    ) -> None:
        """Take the link back from its borrower, if it is there.

        Args:
            seq: Number of the newest request.
            ahead: What was read and not taken.
            unanswered: The borrower's requests under way, in their order.
            has_answered: Whether any answer came to the borrower.
            is_read: Whether the borrower reads the link until it calls `end_turn`.
        """
        link = self.link
        if link.borrower is None:
            return
        self._seq = seq
        link.resume(ahead, has_answered=has_answered, is_read=is_read)
        self._in_flight.take_over(unanswered)
        link.borrower = None

    def remember(self, request: WireRequest) -> Pending:
        """Return a request that was sent over the link while it was lent."""
        return Pending(request, self._wait_for)

    def finish(self, pending: Pending | None, rest: bytes | None) -> None:
        """Write what the socket had no room for, None if the link broke; the borrower left `writing` held for it."""
        try:
            if pending is None or rest is None:
                # As in `_write`: the reader of this link does the rest.
                self.link.interrupt()
            else:
                pending.set_rest(rest)
                self._write(self.link, pending)
        finally:
            self._writing.release()

    @property
    def timeout_s(self) -> float:
        """Longest silence of the server while a reply is due."""
        return self._timeout_s

    def _take_back(self) -> None:
        if (borrower := self.link.borrower) is not None:
            borrower.give_back()

    def call(self, op: str, meta: Mapping[str, Any], arrays: Sequence[Array] = (), reply_bytes: int = 0) -> RpcReply:
        """Send a request and wait for its reply; see `send` and `Pending.result`."""
        reply: RpcReply = self.send(op, meta, arrays, reply_bytes).result()
        return reply

    def close(self) -> None:
        """End the connection; requests without an answer raise `ClosedError`."""
        with self._changed:
            self._take_back()
            self._closed = True
            self._changed.notify_all()
            self.link.interrupt()
        # Whoever writes, or replaces the link, leaves first.
        if self._writing.acquire(timeout=_READER_ENDS_S):
            link = self.link
            self._writing.release()
            link.thread.join(_READER_ENDS_S)

    def _reserve(self, pending: Pending) -> None:
        while True:
            with self._changed:
                self._take_back()
                self._require_alive(pending)
                if self._in_flight.reserve(pending):
                    return
                deadline = max(pending.sent_at, self._progress_at) + self._timeout_s
                if time.monotonic() >= deadline:
                    raise self._lost(pending.op, pending.sent_at, f"{self._in_flight.bytes:,} bytes before it wait")
                link = self.link
                is_reader = link.take_turn(deadline)
            if is_reader:
                link.read(deadline)

    def _unreserve(self, pending: Pending) -> None:
        with self._changed:
            self._in_flight.give_back(pending)
            self._changed.notify_all()

    def _require_alive(self, pending: Pending) -> None:
        if self._closed:
            raise ClosedError(f"the connection to {self._peer} is closed; {pending.op!r} was not sent.")
        if self._failure:
            raise self._lost(pending.op, pending.sent_at, self._failure)

    def _send(self, pending: Pending) -> None:
        """Number a request, remember it and write it. Runs with `_writing` held."""
        try:
            with self._lock:
                self._take_back()  # and nobody borrows the link while `_writing` is held
            pending.seq = self._seq + 1
            self.link.encode(pending, self.client)
            with self._changed:
                self._require_alive(pending)
                self._seq = pending.seq
                pending.deadline = time.monotonic() + self._timeout_s
                self._in_flight.add(pending)
        except BaseException:
            self._unreserve(pending)
            raise
        self._write(self.link, pending)

    def _write(self, link: ServerLink, pending: Pending) -> None:
        try:
            link.write(pending, time.monotonic() + self._timeout_s)
        except TimeoutError:
            with self._changed:
                self._give_up_link("it does not take requests")
        except OSError:
            # The reader of this link sees the same, and either connects again or reports the server as lost.
            link.interrupt()
        except BaseException:
            # What follows a request that is broken off half written would be read as the rest of it.
            link.interrupt()
            raise

    def _wait_for(self, pending: Pending) -> Any:
        while True:
            with self._lock:
                if pending.outcome is not None:
                    break
                self._take_back()
                deadline, link = pending.deadline, self.link
                if time.monotonic() >= deadline:
                    state = f"; it {pending.server_state}" if pending.server_state else ""
                    self._give_up_link(f"it did not answer in time{state}")
                    continue
                is_reader = link.take_turn(deadline)
            if is_reader:
                link.read(deadline)
        if isinstance(pending.outcome, PhalanxError):
            raise pending.outcome
        return pending.outcome

    def _give_up_link(self, why: str) -> None:
        """Take a silent server for lost. Runs with `_changed` held.

        What it may still answer comes over a link that nobody reads any more, so with `retry_s` a new link is as good
        as after a loss.
        """
        if not self._retry_s:
            self._fail(why)
            return
        self._timeout_reason = why
        self._in_flight.put_off(time.monotonic() + self._retry_s + self._timeout_s)
        self.link.interrupt()

    def _link_over(self, channel: Channel, where: str) -> ServerLink:
        return ServerLink(
            channel,
            where,
            self._in_flight,
            peer=self._peer,
            lock=self._lock,
            changed=self._changed,
            waits=self._keep_waiting,
            works=self._note_work,
            lost=self._lose_link,
        )

    def _lose_link(self, link: ServerLink, why: str) -> None:
        """Give up a link that cannot be read any more, and connect again if that is wanted. Runs in its thread."""
        link.channel.interrupt()
        with self._writing:
            link.channel.close()
            with self._changed:
                self._take_back()
                why, self._timeout_reason = self._timeout_reason or why, ""
                if link.has_answered:
                    self._patience.end()
                if link.has_failed_start:
                    self._patience.limit(time.monotonic())
                if self._closed or self._failure or not self._retry_s or self._has_moved():
                    self._fail(why)
                    return
            self._reconnect(why)

    def _keep_waiting(self, pending: Pending, waits_for: str, is_connected: bool) -> None:
        now = time.monotonic()
        with self._changed:
            pending.server_state = f"waits for {waits_for}"
            if is_connected:
                self._in_flight.put_off(now + self._timeout_s)
        if now - max(pending.sent_at, self._logged_at) >= _LOG_EVERY_S:
            self._logged_at = now
            _log.info("%s waits for %s, which waits for %s", self._me, self._peer, waits_for)

    def _note_work(self, does: str, has_moved: bool) -> None:
        now = time.monotonic()
        with self._changed:
            self._in_flight.note_work(does, now if has_moved else None)
            if has_moved:
                self._progress_at = now
                self._in_flight.put_off(now + self._timeout_s)
                self._patience.renew(now)
        if not does:
            self._work_logged_at = -math.inf
            _log.info("%s: %s answers again", self._me, self._peer)
        elif now - self._work_logged_at >= _LOG_WORK_EVERY_S:
            self._work_logged_at = now
            _log.info("%s waits: %s %s", self._me, self._peer, does)

    def _reconnect(self, why: str) -> None:
        """Replace the link and send again what was not answered. Runs with `_writing` held, in the old link's thread.

        The new link's thread starts first: while requests are written again their replies must be taken, or both ends
        could wait for each other with full buffers.
        """
        started = time.monotonic()
        with self._changed:
            until = self._patience.begin(started)
            self._in_flight.put_off(until + self._timeout_s)
            self._changed.notify_all()
        _log.warning("%s lost %s at %s (%s); connecting again", self._me, self._peer, self._dialer.endpoint, why)
        try:
            # A server that ends each connection at once is not asked more often than one that is away.
            self._pause(max(0.0, self._reconnected_at + LONGEST_PAUSE_S - started))
            if time.monotonic() >= until:
                raise TimeoutError("it answers on no connection")
            channel, where = self._dialer.connect(until, self._pause)
        except (OSError, PhalanxError) as error:
            with self._changed:
                self._fail(f"{why}, and for {time.monotonic() - started:.1f} s not again: {error_text(error)}")
            return
        with self._changed:
            link, self._reconnected_at = self._link_over(channel, where), time.monotonic()
            self.link = link
            unanswered = list(self._in_flight)
            if self._closed:
                link.interrupt()
        link.thread.start()
        link.read_on()
        for pending in unanswered:
            link.encode(pending, self.client)
            pending.deadline = time.monotonic() + self._timeout_s
            self._write(link, pending)
        with self._changed:
            if not self._in_flight:
                self._patience.end()
            self._changed.notify_all()

    def _pause(self, seconds: float) -> None:
        with self._changed:
            if self._changed.wait_for(lambda: self._closed, seconds):
                raise ClosedError("it was closed here")
        if self._has_moved():
            raise ServersMovedError("the job has other servers now")

    def _fail(self, why: str) -> None:
        """End the connection for good: every request without an answer fails. Runs with `_changed` held."""
        self._failure = self._failure or why
        self._in_flight.settle_all(self._abort_error)
        self.link.interrupt()
        self._changed.notify_all()

    def _abort_error(self, pending: Pending) -> PhalanxError:
        if self._closed and not self._has_moved():
            return ClosedError(f"the connection to {self._peer} was closed before the answer.")
        return self._lost(pending.op, pending.sent_at, self._failure)

    def _lost(self, op: str, since: float, why: str, where: str = "") -> PeerLostError:
        waited = time.monotonic() - since
        where = where or self.link.where
        error = ServersMovedError if self._has_moved() else PeerLostError
        return error(f"{self._me} asked {self._peer} at {where} for {op!r} and waited {waited:.1f} s: {why}.")


def oldest_requests() -> list[tuple[str, Pending]]:
    """Return the request that has waited longest at each server that this process waits for."""
    return [waiting for connection in list(_connections) if (waiting := connection.oldest_request())]
