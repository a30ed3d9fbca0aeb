"""`TlsChannel`, `ServerCertificate`: TLS 1.3 for connections between hosts, with a self-signed certificate per server.

Nobody signs the certificate. The handshake of `secret` covers its hash instead, so it is as trusted as the job's
secret, and there are no files to hand out.
"""

from __future__ import annotations

import datetime
import hashlib
import socket
from typing import TYPE_CHECKING

from phalanx.errors import ConfigError
from phalanx.ps.wire.channel import Channel
from phalanx.ps.wire.tls_stream import OpenStream, TlsError, client_streams, server_streams
from phalanx.versions import HAS_NATIVE

if HAS_NATIVE:
    from phalanx import _core

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate

    from phalanx._core import DataSession

_VALID = datetime.timedelta(days=3650)


class TlsChannel(Channel):
    """A TLS connection over TCP.

    Args:
        connected: The TCP connection; nothing was read or written yet.
        open_stream: Puts TLS over it.
        certificate_hash: Hash of this server's certificate; None for the client's end.
    """

    has_checksums = False

    def __init__(
        self, connected: socket.socket, open_stream: OpenStream, certificate_hash: bytes | None = None
    ) -> None:
        connected, self._tls = open_stream(connected)
        super().__init__(connected)
        self._certificate_hash = certificate_hash

    def secure(self, deadline: float) -> bytes:
        """Agree on keys; returns the hash of the server's certificate.

        Raises:
            ConfigError: If the other end does not speak TLS.
            OSError: If the connection breaks or `deadline` passes.
        """
        try:
            while events := self._tls.shake_hands():
                self._wait(events, deadline)
        except TlsError as error:
            raise ConfigError(f"it does not speak TLS 1.3 ({error}). Check address and port") from None
        return self._certificate_hash or hashlib.sha256(self._tls.peer_certificate()).digest()

    def serve(self, session: DataSession) -> bool:
        """Answer pulls and pushes until another frame is next; where Python encrypts, every frame is left to it."""
        return self._serve(session, self._tls) if isinstance(self._tls, _core.TlsStream) else True

    def _receive_some(self, view: memoryview) -> int:
        return self._tls.receive(view)

    def _send_some(self, parts: list[memoryview], descriptor: int | None) -> int:
        return self._tls.send(parts)


def client_channel(connected: socket.socket) -> TlsChannel:
    """Return the client's end of TLS over a TCP connection."""
    return TlsChannel(connected, client_streams())


class ServerCertificate:
    """The certificate of a server and its key, made when it starts and gone with it."""

    def __init__(self) -> None:
        certificate, key = _make_certificate()
        self._hash = hashlib.sha256(_der(certificate)).digest()
        self._open_stream = server_streams(certificate, key)

    def channel(self, connected: socket.socket) -> TlsChannel:
        """Return the server's end of TLS over a TCP connection."""
        return TlsChannel(connected, self._open_stream, self._hash)


def _der(certificate: Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.DER)


def _make_certificate() -> tuple[Certificate, EllipticCurvePrivateKey]:
    # Imported here because a job on one host never needs it.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
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
    return certificate, key
