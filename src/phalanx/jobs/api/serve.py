"""`serve`: run the API server (uvicorn): bind, TLS, graceful shutdown."""

from __future__ import annotations

import errno
import logging
import signal
import socket
import threading
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from phalanx.cluster.network import is_loopback, port_owner
from phalanx.errors import ConfigError

logger = logging.getLogger("phalanx.jobs")

PORT = 8470
"""The server's default port."""

_STOP_S = 5
"""How long a stopping server waits for answers that are under way; streams of logs would never end."""


@dataclass(frozen=True)
class ListenOptions:
    """Where to listen.

    Attributes:
        host: A name or address; anything but loopback needs a certificate.
        port: 0 lets the system choose.
        certificate: PEM file of the certificate and what it is signed by.
        key: PEM file of the certificate's key, if it is not in the same file.
    """

    host: str = "127.0.0.1"
    port: int = PORT
    certificate: Path | None = None
    key: Path | None = None


def bind(options: ListenOptions) -> socket.socket:
    """Return a socket bound to the address in `options`.

    Raises:
        ConfigError: If it would serve a network in the clear, or the address cannot be bound.
    """
    family, address = _resolve(options)
    if options.certificate is None and not is_loopback(address[0]):
        raise ConfigError(
            f"--host {options.host} can be reached from other machines, and tokens would be sent in the clear. "
            "Give --certificate FILE.pem [--key FILE.pem], or listen on 127.0.0.1 and use a tunnel (ssh -L)."
        )
    # With the protocol named, asyncio turns Nagle's algorithm off: small answers would wait 40 ms for an ACK.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ConfigError(_why_not(options, error)) from None
    return bound


def _resolve(options: ListenOptions) -> tuple[socket.AddressFamily, tuple[str, int]]:
    try:
        candidates = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ConfigError(f"--host {options.host!r} is no address of this machine ({error}).") from None
    family, _, _, _, address = candidates[0]
    return family, (str(address[0]), int(address[1]))


def _why_not(options: ListenOptions, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        owner = port_owner(options.port)
        return (
            f"--port {options.port} on {options.host} is in use by {owner}. End that process, or choose another --port."
        )
    return f"Cannot listen on {options.host}:{options.port}: {error.strerror}."


def address_of(bound: socket.socket, options: ListenOptions) -> str:
    """Return the URL of a server on `bound`."""
    host = f"[{options.host}]" if ":" in options.host else options.host
    return f"{'https' if options.certificate else 'http'}://{host}:{bound.getsockname()[1]}"


def serve(app: ASGIApp, bound: socket.socket, options: ListenOptions) -> None:
    """Answer requests on `bound` until this process is asked to end (SIGINT, SIGTERM).

    Raises:
        ConfigError: If the certificate and its key cannot be used.
    """
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        ssl_certfile=options.certificate,
        ssl_keyfile=options.key,
        timeout_graceful_shutdown=_STOP_S,
        server_header=False,
    )
    try:
        config.load()
    except OSError as error:  # ssl's errors are among them
        raise ConfigError(f"The certificate {options.certificate} cannot be used ({error}).") from None
    logger.info("serving %s", address_of(bound, options))
    server = uvicorn.Server(config)
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            # uvicorn takes signals once it runs, and afterwards sends each again to the handler before its own.
            signal.signal(number, server.handle_exit)
    server.run(sockets=[bound])
