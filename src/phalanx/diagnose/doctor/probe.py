"""`measure`: another node over TCP: can its ports be reached, latency, bandwidth and the difference of clocks.

    client -> server   b"T"                        server -> client   its time of day, float64
    client -> server   b"B", how many bytes, them  server -> client   b"K" when the last has come

A server answers while `phalanx doctor` runs, at a port that the system chooses, as the ranks of a job would listen.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

CONNECT_S = 3.0
"""How long another node may take to answer."""

LARGEST = 256 << 20
"""Most bytes of one measurement."""

_ROUNDS = 20
_BULK = 16 << 20
_CHUNK = 1 << 20
_COUNT, _TIME = struct.Struct("<Q"), struct.Struct("<d")


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkQuality:
    """What one node measured of another."""

    latency_s: float = 0.0
    """Half the shortest round trip of one byte."""

    bytes_per_s: float = 0.0
    clock_ahead_s: float = 0.0
    """How far the other node's clock is ahead of this one's."""

    clock_error_s: float = 0.0
    """By how much that may be wrong: half a round trip."""

    error: str = ""
    """Why nothing could be measured; empty when it was."""


class ProbeServer:
    """Answers probes until it is closed.

    Args:
        address: Own address at which others reach this node.
    """

    def __init__(self, address: str) -> None:
        self._socket = socket.create_server((address, 0))
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="probe server", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=_serve, args=(client,), name="probe", daemon=True).start()


def _serve(client: socket.socket) -> None:
    with client, contextlib.suppress(OSError):
        client.settimeout(60)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while command := client.recv(1):
            if command == b"T":
                client.sendall(_TIME.pack(time.time()))
            elif command == b"B":
                (count,) = _COUNT.unpack(_receive(client, _COUNT.size))
                if count > LARGEST:
                    return
                _discard(client, count)
                client.sendall(b"K")
            else:
                return


def measure(host: str, port: int, *, with_bandwidth: bool) -> LinkQuality:
    """Measure the way to the probe server of another node.

    Args:
        host: Its address.
        port: Port of its probe server.
        with_bandwidth: Whether to send some megabytes, too.
    """
    try:
        with _connected(host, port) as link:
            round_trips = [_ask_time(link) for _ in range(_ROUNDS)]
            shortest, ahead = min(round_trips)
            return LinkQuality(
                latency_s=shortest / 2,
                clock_ahead_s=ahead,
                clock_error_s=shortest / 2,
                bytes_per_s=_bandwidth(link) if with_bandwidth else 0.0,
            )
    except (OSError, struct.error) as error:
        why = "no answer" if isinstance(error, TimeoutError) else getattr(error, "strerror", None) or str(error)
        return LinkQuality(error=f"{host}:{port} cannot be reached ({why})")


@contextmanager
def _connected(host: str, port: int) -> Iterator[socket.socket]:
    with socket.create_connection((host, port), timeout=CONNECT_S) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield link


def _ask_time(link: socket.socket) -> tuple[float, float]:
    """Return how long an answer took, and how far the other clock was ahead in the middle of that."""
    sent, started = time.time(), time.perf_counter()
    link.sendall(b"T")
    (there,) = _TIME.unpack(_receive(link, _TIME.size))
    took = time.perf_counter() - started
    return took, there - (sent + took / 2)


def _bandwidth(link: socket.socket) -> float:
    """Send some megabytes three times and return the middle rate, bytes/s."""
    link.settimeout(60)
    chunk, rates = memoryview(bytes(_CHUNK)), []
    for _ in range(3):
        started = time.perf_counter()
        link.sendall(b"B" + _COUNT.pack(_BULK))
        for _ in range(_BULK // _CHUNK):
            link.sendall(chunk)
        _receive(link, 1)
        rates.append(_BULK / (time.perf_counter() - started))
    return statistics.median(rates)


def _receive(link: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = link.recv(count - len(data))
        if not part:
            raise ConnectionAbortedError("it closed the connection")
        data += part
    return data


def _discard(link: socket.socket, count: int) -> None:
    room = memoryview(bytearray(_CHUNK))
    while count:
        taken = link.recv_into(room[: min(count, _CHUNK)])
        if not taken:
            raise ConnectionAbortedError("it closed the connection")
        count -= taken
