"""`TlsChannel`, `Certificate`: TLS 1.3 for connections between hosts, with a self-signed certificate per server.

Nobody signs the certificate. The handshake of `secret` covers its hash instead, so it is as trusted as the job's
secret, and there are no files to hand out.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import select
import socket
import ssl
import threading
from typing import TYPE_CHECKING

from phalanx.errors import ConfigError
from phalanx.ps.wire.channel import Channel

if TYPE_CHECKING:
    from phalanx._core import DataSession

_RECORD_BYTES = 1 << 14
_VALID = datetime.timedelta(days=3650)


class TlsChannel(Channel):
    """A TLS connection over TCP."""

    def __init__(self, connected: ssl.SSLSocket, certificate_hash: bytes | None = None) -> None:
        super().__init__(connected)
        self._tls = connected
        self._certificate_hash = certificate_hash
        # The state of a TLS connection must not be touched by a reading and a writing thread at once.
        self._lock = threading.Lock()

    def secure(self, deadline: float) -> bytes:
        """Agree on keys; returns the hash of the server's certificate.

        Raises:
            ConfigError: If the other end does not speak TLS.
            OSError: If the connection breaks or `deadline` passes.
        """
        try:
            self._shake_hands(deadline)
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            raise
        except ssl.SSLError as error:
            raise ConfigError(f"it does not speak TLS 1.3 ({error.reason}). Check address and port") from None
        if self._certificate_hash is not None:
            return self._certificate_hash
        return hashlib.sha256(self._tls.getpeercert(binary_form=True) or b"").digest()

    def _shake_hands(self, deadline: float) -> None:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN, deadline)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT, deadline)
            else:
                return

    def serve(self, session: DataSession) -> bool:
        """Answer nothing: the native core reads no TLS, so every frame is read here."""
        return True

    def _receive_some(self, view: memoryview) -> int:
        with self._lock:
            try:
                return self._tls.recv_into(view)
            except ssl.SSLWantReadError:
                raise BlockingIOError from None

    def _send_some(self, parts: list[memoryview], descriptor: int | None) -> int:
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


def client_channel(connected: socket.socket) -> TlsChannel:
    """Return the client's end of TLS over a TCP connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the proof of `secret` covers the certificate
    return TlsChannel(_wrap_socket(context, connected, is_server=False))


class Certificate:
    """The key of a server, made when it starts and gone with it."""

    def __init__(self) -> None:
        certificate, key = _make_certificate()
        self._hash = hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate.decode())).digest()
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        _load(self._context, certificate + key)

    def channel(self, connected: socket.socket) -> TlsChannel:
        """Return the server's end of TLS over a TCP connection."""
        return TlsChannel(_wrap_socket(self._context, connected, is_server=True), self._hash)


def _wrap_socket(context: ssl.SSLContext, connected: socket.socket, *, is_server: bool) -> ssl.SSLSocket:
    connected.setblocking(False)
    return context.wrap_socket(connected, server_side=is_server, do_handshake_on_connect=False)


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    """Give a context its key through memory: `ssl` reads files only, and the key should be in none."""
    descriptor = os.memfd_create("phalanx-certificate", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, pem)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _make_certificate() -> tuple[bytes, bytes]:
    # Imported here because a job on one host never needs it.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "phalanx")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + _VALID)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM), private
