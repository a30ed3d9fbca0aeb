"""`TlsStream`: TLS 1.3 over one socket, by the native core, or by Python's `ssl` where that cannot load OpenSSL.

Both speak the same protocol, so the two ends of a connection need not have the same.
"""

from __future__ import annotations

import functools
import logging
import os
import select
import socket
import ssl
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from phalanx.versions import HAS_NATIVE

if HAS_NATIVE:
    from phalanx import _core

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate

    from phalanx._core import TlsContext

_log = logging.getLogger("phalanx.ps.wire")
_RECORD_BYTES = 1 << 14


class TlsError(Exception):
    """The other end does not speak TLS 1.3; the text is OpenSSL's reason."""


class TlsStream(Protocol):
    """One end of a connection; any thread may call it."""

    def shake_hands(self) -> int:
        """Continue with the agreement on keys; returns the events to `poll` for before the next call, 0 at its end.

        Raises:
            TlsError: If the other end speaks something else.
            OSError: If the connection breaks.
        """
        ...

    def peer_certificate(self) -> bytes:
        """Return the server's certificate, in DER. For the client, after the handshake."""
        ...

    def receive(self, memory: memoryview) -> int:
        """Read what is there, and return how many bytes; 0 at the end.

        Raises:
            BlockingIOError: If nothing is there yet.
            OSError: If the connection breaks.
        """
        ...

    def send(self, parts: list[memoryview]) -> int:
        """Write the beginning of some parts, and return how many bytes.

        Raises:
            BlockingIOError: If there is no room; the next call must have the same parts.
            OSError: If the connection breaks.
        """
        ...


OpenStream = Callable[[socket.socket], tuple[socket.socket, TlsStream]]
"""Puts TLS over a connected socket; returns the socket to wait for and to close, and the stream."""


class PythonTlsStream:
    """A `TlsStream` by Python's `ssl`."""

    def __init__(self, connected: ssl.SSLSocket) -> None:
        self._tls = connected
        # The state of a TLS connection must not be touched by a reading and a writing thread at once.
        self._lock = threading.Lock()

    def shake_hands(self) -> int:
        """Continue with the agreement on keys. See `TlsStream`."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return select.POLLIN
        except ssl.SSLWantWriteError:
            return select.POLLOUT
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            raise
        except ssl.SSLError as error:
            raise TlsError(str(error.reason).replace("_", " ").lower()) from None
        return 0

    def peer_certificate(self) -> bytes:
        """Return the server's certificate. See `TlsStream`."""
        return self._tls.getpeercert(binary_form=True) or b""

    def receive(self, memory: memoryview) -> int:
        """Read what is there. See `TlsStream`."""
        with self._lock:
            try:
                return self._tls.recv_into(memory)
            except ssl.SSLWantReadError:
                raise BlockingIOError from None

    def send(self, parts: list[memoryview]) -> int:
        """Write the beginning of some parts. See `TlsStream`."""
        # TLS has no gathering write: small parts are joined so that each does not become a record of its own.
        joined = parts[0] if len(parts[0]) >= _RECORD_BYTES else b"".join(_up_to(parts, _RECORD_BYTES))
        with self._lock:
            try:
                return self._tls.send(joined)
            except ssl.SSLWantWriteError:
                raise BlockingIOError from None


def _up_to(parts: list[memoryview], limit: int) -> list[memoryview]:
    taken: list[memoryview] = []
    for part in parts:
        taken.append(part[:limit])
        limit -= len(part)
        if limit <= 0:
            break
    return taken


@functools.cache
def is_native() -> bool:
    """Return whether the native core encrypts; the log says once why it does not."""
    if not HAS_NATIVE:
        return False
    try:
        _core.TlsContext.client()
    except RuntimeError as error:
        _log.warning(
            "connections to other hosts are encrypted by Python, which takes more processor time: OpenSSL 3 cannot be "
            "loaded (%s). Install libssl.so.3",
            error,
        )
        return False
    return True


def client_streams() -> OpenStream:
    """Return what makes the client's end. It checks no certificate: the proof of `secret` covers it."""
    if is_native():
        return _native_streams(_core.TlsContext.client())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return _python_streams(context, is_server=False)


def server_streams(certificate: Certificate, key: EllipticCurvePrivateKey) -> OpenStream:
    """Return what makes the end of the server with that certificate and the private key to it."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    pkcs8, no_password = PrivateFormat.PKCS8, NoEncryption()
    if is_native():
        der = certificate.public_bytes(Encoding.DER), key.private_bytes(Encoding.DER, pkcs8, no_password)
        return _native_streams(_core.TlsContext.server(*der))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    pem = certificate.public_bytes(Encoding.PEM), key.private_bytes(Encoding.PEM, pkcs8, no_password)
    _load(context, b"".join(pem))
    return _python_streams(context, is_server=True)


def _native_streams(context: TlsContext) -> OpenStream:
    def open_stream(connected: socket.socket) -> tuple[socket.socket, TlsStream]:
        connected.setblocking(False)
        return connected, _core.TlsStream(context, connected.fileno())

    return open_stream


def _python_streams(context: ssl.SSLContext, *, is_server: bool) -> OpenStream:
    def open_stream(connected: socket.socket) -> tuple[socket.socket, TlsStream]:
        connected.setblocking(False)
        wrapped = context.wrap_socket(connected, server_side=is_server, do_handshake_on_connect=False)
        return wrapped, PythonTlsStream(wrapped)

    return open_stream


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    """Give a context its key through memory: `ssl` reads files only, and the key should be in none."""
    descriptor = os.memfd_create("phalanx-certificate", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, pem)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
