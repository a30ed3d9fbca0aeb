"""`Dialer`, `Patience`: connect to a server, with handshake and retries, and how long to ask for one that was lost."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from phalanx.errors import ConfigError
from phalanx.ps.wire import address, secret, tls
from phalanx.ps.wire.channel import Channel, UnixChannel, error_text, prepare_tcp

_log = logging.getLogger("phalanx.ps.wire")
_HANDSHAKE_S = 10.0
_FIRST_PAUSE_S = 0.02
_LOG_EVERY_S = 5.0

LONGEST_PAUSE_S = 0.5
"""Longest time between two tries."""


@dataclass(frozen=True, slots=True)
class Dialer:
    """Who calls which server."""

    endpoint: str
    """`host:port` of the server."""

    key: bytes = field(repr=False)
    """The job's secret."""

    me: str
    """Who calls, as `worker 1`."""

    client: int
    """The caller's number."""

    peer: str
    """Who the server must be, as `server 0`."""

    def connect(self, until: float, pause: Callable[[float], None]) -> tuple[Channel, str]:
        """Connect and greet, again and again until that server answers.

        Args:
            until: When to give up, on the clock of `time.monotonic`.
            pause: Waits so many seconds between two tries; may raise to give up.

        Returns:
            The socket, and the server's address as messages show it.

        Raises:
            ConfigError: If something else than that server of this job and version answers.
            OSError: If nothing answers.
        """
        local = secret.greeting(self.me, self.client)
        seconds, log_at = _FIRST_PAUSE_S, time.monotonic() + _LOG_EVERY_S
        while True:
            try:
                return self._connect_once(local, until)
            except ConfigError as error:
                text = str(error).rstrip(".")
                raise ConfigError(f"{self.me} cannot use {self.peer} at {self.endpoint}: {text}.") from None
            except OSError as error:
                now = time.monotonic()
                if now + seconds >= until:
                    raise
                if now >= log_at:
                    _log.info("%s: waiting for %s at %s (%s)", self.me, self.peer, self.endpoint, error_text(error))
                    log_at = now + _LOG_EVERY_S
            pause(seconds)
            seconds = min(2 * seconds, LONGEST_PAUSE_S)

    def _connect_once(self, local: secret.Greeting, until: float) -> tuple[Channel, str]:
        to = address.resolve(self.endpoint)
        deadline = min(until, time.monotonic() + _HANDSHAKE_S)
        connected = _connect(to, deadline)
        channel = _channel(connected)
        try:
            binding = channel.secure(deadline)
            secret.greet(channel, local, secret=self.key, peer=self.peer, binding=binding, deadline=deadline)
        except BaseException:
            channel.close()
            raise
        return channel, f"{to} (Unix socket)" if connected.family == socket.AF_UNIX else str(to)


def _connect(to: address.Address, deadline: float) -> socket.socket:
    try:
        return _open_socket(socket.AF_UNIX, to.unix_name, deadline)
    except ConnectionRefusedError:
        return _open_socket(to.family, (to.host, to.port), deadline)


def _open_socket(family: int, name: Any, deadline: float) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        sock.connect(name)
    except BaseException:
        sock.close()
        raise
    return sock


def _channel(connected: socket.socket) -> Channel:
    if connected.family == socket.AF_UNIX:
        return UnixChannel(connected)
    prepare_tcp(connected)
    if address.is_private(connected.getpeername()):
        return Channel(connected)
    return tls.client_channel(connected)


class Patience:
    """Begins with a loss and ends with an answer. A server that is on its way to an answer does not use it up.

    Times are those of `time.monotonic`.

    Args:
        seconds: How long to ask for a server that gives no sign.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: float | None = None
        self._can_grow = True

    def begin(self, now: float) -> float:
        """Return when to give up a server that is lost now, or was before and has not answered since."""
        if self._until is None:
            self._until = now + self._seconds
        return self._until

    def renew(self, now: float) -> None:
        """Note that the server came nearer to an answer."""
        if self._until is not None and self._can_grow:
            self._until = now + self._seconds

    def limit(self, now: float) -> None:
        """Note that the server's start failed: it may be started again, and fail again whatever it says before."""
        if self._can_grow:
            self._until, self._can_grow = now + self._seconds, False

    def end(self) -> None:
        """Note that the server answered."""
        self._until, self._can_grow = None, True
