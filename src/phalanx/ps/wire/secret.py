"""`greet`, `admit`: mutual authentication handshake with the job's secret.

    client -> server   greeting: magic, wire version, version, nonce, client's number, name
    server -> client   greeting
    client -> server   HMAC-SHA256(secret, "client" | both greetings | channel)
    server -> client   HMAC-SHA256(secret, "server" | both greetings | channel)

A greeting has a fixed size, so reading one cannot cost memory. `channel` is the hash of the server's certificate under
TLS: whoever sits between two ends shows another certificate, and no proof fits. The client proves first; a server
tells strangers nothing that depends on the secret.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from dataclasses import dataclass

import phalanx
from phalanx.errors import ConfigError
from phalanx.ps.wire.channel import Channel
from phalanx.ps.wire.frame import MAGIC, WIRE_VERSION

_GREETING = struct.Struct("<4sH26s32sQ56s")
_NAME_BYTES = 56
_PROOF_BYTES = 32
_REFUSED = bytes(_PROOF_BYTES)


@dataclass(frozen=True, slots=True)
class Greeting:
    """The first message of one end."""

    raw: bytes
    wire_version: int
    version: str
    client: int
    name: str

    @property
    def versions(self) -> str:
        """Return both versions, as messages show them."""
        return f"phalanx {self.version} with wire version {self.wire_version}"


def greeting(name: str, client: int = 0) -> Greeting:
    """Return the greeting of this process.

    Raises:
        ConfigError: If the name is too long to travel.
    """
    if len(name.encode()) > _NAME_BYTES or not name.isprintable():
        raise ConfigError(f"the name {name!r} cannot be sent; use at most {_NAME_BYTES} printable bytes.")
    version = phalanx.__version__
    nonce = secrets.token_bytes(32)
    raw = _GREETING.pack(MAGIC, WIRE_VERSION, version.encode(), nonce, client, name.encode())
    return Greeting(raw, WIRE_VERSION, version, client, name)


def greet(channel: Channel, local: Greeting, *, secret: bytes, peer: str, binding: bytes, deadline: float) -> None:
    """Make a server accept this client, and make sure of the server.

    Args:
        channel: Connected to the server; nothing was read or written yet.
        local: This client's greeting.
        secret: The job's secret.
        peer: Name the server must have, as `server 0`.
        binding: Hash of the certificate the server showed; empty without TLS.
        deadline: Moment of `time.monotonic` by which all is done.

    Raises:
        ConfigError: If it is not a server of this job and version.
        OSError: If the connection breaks or the deadline passes.
    """
    channel.send([local.raw], deadline=deadline)
    remote = _read(channel, deadline)
    _require_same_versions(local, remote)
    channel.send([_proof(secret, b"client", local, remote, binding)], deadline=deadline)
    answer = bytearray(_PROOF_BYTES)
    channel.fill(memoryview(answer), deadline)
    if not hmac.compare_digest(answer, _proof(secret, b"server", local, remote, binding)):
        raise ConfigError("the secrets differ. Start servers and workers with the same secret")
    if remote.name != peer:
        raise ConfigError(f"it is {remote.name}. Give all processes the same list of servers, in the same order")


def admit(channel: Channel, local: Greeting, *, secret: bytes, binding: bytes, deadline: float) -> Greeting:
    """Make sure of a client, then prove this server to it; returns the client's greeting.

    Raises:
        ConfigError: If it is not a client of this job and version.
        OSError: If the connection breaks or the deadline passes.
    """
    remote = _read(channel, deadline)
    channel.send([local.raw], deadline=deadline)
    _require_same_versions(local, remote)
    proof = bytearray(_PROOF_BYTES)
    channel.fill(memoryview(proof), deadline)
    if not hmac.compare_digest(proof, _proof(secret, b"client", remote, local, binding)):
        channel.send([_REFUSED], deadline=deadline)
        raise ConfigError("the secrets differ. Start servers and workers with the same secret")
    channel.send([_proof(secret, b"server", remote, local, binding)], deadline=deadline)
    return remote


def _read(channel: Channel, deadline: float) -> Greeting:
    raw = bytearray(_GREETING.size)
    # The first bytes alone, because something else may send fewer than a greeting and wait.
    channel.fill(memoryview(raw)[: len(MAGIC)], deadline)
    if raw[: len(MAGIC)] != MAGIC:
        raise ConfigError(f"it does not speak this protocol (it sent {bytes(raw[: len(MAGIC)])!r}). Check the port")
    channel.fill(memoryview(raw)[len(MAGIC) :], deadline)
    _, wire_version, version, _, client, name = _GREETING.unpack(raw)
    return Greeting(bytes(raw), wire_version, _text(version), client, _text(name))


def _text(padded: bytes) -> str:
    text = padded.rstrip(b"\0").decode("utf-8", "replace")
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _require_same_versions(local: Greeting, remote: Greeting) -> None:
    if (local.wire_version, local.version) != (remote.wire_version, remote.version):
        raise ConfigError(
            f"it runs {remote.versions}, this process {local.versions}. Install the same version on all hosts"
        )


def _proof(secret: bytes, side: bytes, client: Greeting, server: Greeting, binding: bytes) -> bytes:
    return hmac.digest(secret, b"|".join((side, client.raw, server.raw, binding)), "sha256")
