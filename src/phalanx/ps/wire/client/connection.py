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
from phalanx.ps.wire.client.client_link import ClientLink
from phalanx.ps.wire.client.dial import LONGEST_PAUSE_S, Dialer, Patience
from phalanx.ps.wire.client.in_flight import InFlight
from phalanx.ps.wire.client.link import ServerLink
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
        lock: Shared by the connections over which native code sends at once; of its own when None.

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
        self.lock = threading.RLock() if lock is None else lock
        self._changed = threading.Condition(self.lock)
        self._in_flight = InFlight(max_unanswered_bytes)
        self._failure = self._timeout_reason = ""
        self._logged_at = self._work_logged_at = self._progress_at = -math.inf
        self._closed = False
        self._patience = Patience(retry_s)
        # Held while requests get their numbers and are written, and while the link is replaced.
        self._writing = threading.Lock()
        started = time.monotonic()
        try:
            channel, where = self._dialer.connect(started + connect_s, self._pause)
        except OSError as error:
            why = f"{error_text(error)}. Start it, or correct the address"
            raise self._lost("connect", started, why, endpoint) from None
        self._reconnected_at = -math.inf
        self.link = self._link_over(channel, where, 0)
        """The way to the server now; it is replaced when it is lost."""

        self.link.thread.start()
        _connections.add(self)

    def oldest_request(self) -> tuple[str, Pending] | None:
        """Return the server and the request that has waited longest for its answer, or None when none waits."""
        with self.lock:
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
        pending.sent_at = time.monotonic()
        self._wait_for_room(pending)
        # Untimed: whoever writes, or replaces the link, has a deadline.
        with self._writing:
            self._send(pending)
        return pending

    def fail(self, request: WireRequest, error: PhalanxError) -> Pending:
        """Return a request that could not be sent as one whose answer is the error."""
        pending = Pending(request, self._wait_for)
        pending.settle(error)
        return pending

    @property
    def takes_native(self) -> bool:
        """Whether native code may send over the link now. Runs with the lock held."""
        return self._in_flight.is_clear and self.link.pool is not None and not (self._closed or self._failure)

    @property
    def is_written(self) -> bool:
        """Whether a request is being written, or the link replaced."""
        return self._writing.locked()

    def remember(self, request: WireRequest) -> Pending:
        """Return a request that native code sent."""
        return Pending(request, self._wait_for)

    def take_over(self) -> None:
        """Have what native code has under way on the link."""
        with self.lock:
            self._in_flight.take_over()

    def finish(self, pending: Pending | None, rest: bytes | None) -> None:
        """Write what the socket had no room for, None if the link broke. Native code left `writing` locked for it."""
        if pending is None or rest is None:
            # As in `_write`: the reader of this link does the rest.
            self.link.interrupt()
        else:
            pending.set_rest(rest)
            self._write(self.link, pending)

    @property
    def timeout_s(self) -> float:
        """Longest silence of the server while a reply is due."""
        return self._timeout_s

    def call(self, op: str, meta: Mapping[str, Any], arrays: Sequence[Array] = (), reply_bytes: int = 0) -> RpcReply:
        """Send a request and wait for its reply; see `send` and `Pending.result`."""
        reply: RpcReply = self.send(op, meta, arrays, reply_bytes).result()
        return reply

    def close(self) -> None:
        """End the connection; requests without an answer raise `ClosedError`."""
        with self.lock:
            self._closed = True
            self._changed.notify_all()
            self.link.interrupt()
        until = time.monotonic() + _READER_ENDS_S
        while (link := self.link).thread.is_alive() and time.monotonic() < until:
            link.thread.join(until - time.monotonic())  # it may start that of another link before it ends

    def _wait_for_room(self, pending: Pending) -> None:
        while True:
            with self.lock:
                self._require_alive(pending)
                if self._in_flight.has_room(pending):
                    return
                deadline = max(pending.sent_at, self._progress_at) + self._timeout_s
                if time.monotonic() >= deadline:
                    raise self._lost(pending.op, pending.sent_at, f"{self._in_flight.bytes:,} bytes before it wait")
                link, first = self.link, self._in_flight.first
                is_free = link.is_free(deadline)
            if is_free:
                link.read(deadline, first)

    def _require_alive(self, pending: Pending) -> None:
        if self._closed:
            raise ClosedError(f"the connection to {self._peer} is closed; {pending.op!r} was not sent.")
        if self._failure:
            raise self._lost(pending.op, pending.sent_at, self._failure)

    def _send(self, pending: Pending) -> None:
        """Number a request, remember it and write it. Runs with `_writing` held."""
        pending.seq = self.link.state.seq + 1  # native code sends nothing while `_writing` is locked
        self.link.encode(pending, self.client)
        try:
            with self.lock:
                self._require_alive(pending)
                self.link.state.seq = pending.seq
                pending.deadline = time.monotonic() + self._timeout_s
                self._in_flight.add(pending)
            self._write(self.link, pending)
        except BaseException:
            # A new link gets all that is in flight, also what was not written.
            self.link.interrupt()
            raise

    def _write(self, link: ServerLink, pending: Pending) -> None:
        try:
            link.write(pending, time.monotonic() + self._timeout_s)
        except TimeoutError:
            with self.lock:
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
            with self.lock:
                if pending.outcome is not None:
                    break
                deadline, link = pending.deadline, self.link
                if time.monotonic() >= deadline:
                    state = f"; it {pending.server_state}" if pending.server_state else ""
                    self._give_up_link(f"it did not answer in time{state}")
                    continue
                is_free = link.is_free(deadline)
            if is_free:
                link.read(deadline, pending)
        if isinstance(pending.outcome, PhalanxError):
            raise pending.outcome
        return pending.outcome

    def _give_up_link(self, why: str) -> None:
        """Take a silent server for lost. Runs with the lock held.

        What it may still answer comes over a link that nobody reads any more, so with `retry_s` a new link is as good
        as after a loss.
        """
        if not self._retry_s:
            self._fail(why)
            return
        self._timeout_reason = why
        self._in_flight.put_off(time.monotonic() + self._retry_s + self._timeout_s)
        self.link.interrupt()

    def _link_over(self, channel: Channel, where: str, seq: int) -> ServerLink:
        terms = self.client, seq, self._in_flight.most_bytes, self._writing
        self._in_flight.link = state = ClientLink(channel, channel.ahead_memory, *terms)
        return ServerLink(
            channel,
            state,
            where,
            self._in_flight,
            peer=self._peer,
            lock=self.lock,
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
            with self.lock:
                why, self._timeout_reason = self._timeout_reason or why, ""
                if link.state.has_answered:
                    self._patience.end()
                if link.has_failed_start:
                    self._patience.limit(time.monotonic())
                if self._closed or self._failure or not self._retry_s or self._has_moved():
                    self._fail(why)
                    return
            self._reconnect(why)

    def _keep_waiting(self, pending: Pending, waits_for: str, is_connected: bool) -> None:
        now = time.monotonic()
        with self.lock:
            pending.server_state = f"waits for {waits_for}"
            if is_connected:
                self._in_flight.put_off(now + self._timeout_s)
        if now - max(pending.sent_at, self._logged_at) >= _LOG_EVERY_S:
            self._logged_at = now
            _log.info("%s waits for %s, which waits for %s", self._me, self._peer, waits_for)

    def _note_work(self, does: str, has_moved: bool) -> None:
        now = time.monotonic()
        with self.lock:
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
        with self.lock:
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
            with self.lock:
                self._fail(f"{why}, and for {time.monotonic() - started:.1f} s not again: {error_text(error)}")
            return
        with self.lock:
            self._in_flight.take_over()
            link, self._reconnected_at = self._link_over(channel, where, self.link.state.seq), time.monotonic()
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
        with self.lock:
            if not self._in_flight:
                self._patience.end()
            self._changed.notify_all()

    def _pause(self, seconds: float) -> None:
        with self.lock:
            if self._changed.wait_for(lambda: self._closed, seconds):
                raise ClosedError("it was closed here")
        if self._has_moved():
            raise ServersMovedError("the job has other servers now")

    def _fail(self, why: str) -> None:
        """End the connection for good: every request without an answer fails. Runs with the lock held."""
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
