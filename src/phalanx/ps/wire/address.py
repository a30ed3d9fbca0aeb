"""`resolve`, `listening_sockets`: resolve and bind server addresses: a Unix socket for local clients, TCP for all."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from typing import Any

from phalanx.addresses import parse_endpoint
from phalanx.cluster.network import is_loopback
from phalanx.errors import ConfigError

BACKLOG = 1024
SHORTEST_SECRET = 16


@dataclass(frozen=True, slots=True)
class Address:
    """A numeric address and a port."""

    host: str
    port: int

    @property
    def family(self) -> socket.AddressFamily:
        """Return whether it is IPv4 or IPv6."""
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET

    @property
    def unix_name(self) -> str:
        """Return the abstract Unix socket of a server with this address on this host.

        The address is part of it, because servers on 127.0.0.1 and 127.0.0.2 may have the same port.
        """
        return f"\0phalanx/{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def resolve(endpoint: str) -> Address:
    """Return the numeric address of `host:port`.

    Raises:
        ConfigError: If it is not written so.
        OSError: If no address is known for the host; a name server may know it later.
    """
    address = parse_endpoint(endpoint, least_port=0)
    if address is None:
        raise ConfigError(f"the endpoint {endpoint!r} is not host:port with a port of 0 to 65535. Correct it.")
    try:
        addresses = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    except ValueError as error:  # a label that is too long, or no letter: nothing that a name server could know
        raise ConfigError(f"the host of {endpoint!r} is no name ({error}). Correct it.") from None
    numeric = addresses[0][4]
    return Address(str(numeric[0]), int(numeric[1]))


def listening_sockets(endpoint: str, secret: bytes, bound: socket.socket | None = None) -> list[socket.socket]:
    """Listen at an endpoint, over a Unix socket for this host and over TCP.

    Args:
        endpoint: `host:port` as the clients have it; port 0 lets the system choose.
        secret: The job's secret.
        bound: TCP socket already bound to it (or to every interface); made when None.

    Returns:
        The Unix socket and the TCP socket.

    Raises:
        ConfigError: If an address others can reach has no secret, or the endpoint is taken.
    """
    try:
        address = resolve(endpoint)
    except OSError as error:
        raise ConfigError(f"cannot listen at {endpoint}: {error.strerror}. Correct the host.") from None
    tcp = bound or _bind_tcp(address)
    # Clients try the Unix socket first: it must be there when TCP starts to listen.
    address = Address(address.host, tcp.getsockname()[1])
    unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        require_secret(tcp, secret)
        unix.bind(address.unix_name)
        unix.listen(BACKLOG)
        tcp.listen(BACKLOG)
    except OSError as error:
        unix.close()
        tcp.close()
        raise ConfigError(f"cannot listen at {address}: {error.strerror}. Stop the process that does.") from None
    except ConfigError:
        unix.close()
        tcp.close()
        raise
    return [unix, tcp]


def _bind_tcp(address: Address) -> socket.socket:
    tcp = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tcp.bind((address.host, address.port))
    except OSError as error:
        tcp.close()
        raise ConfigError(f"cannot listen at {address}: {error.strerror}. Choose another port.") from None
    return tcp


def require_secret(listening: socket.socket, secret: bytes) -> None:
    """Refuse to listen where other hosts can connect without a secret they must know.

    Raises:
        ConfigError: If the socket is such a one and the secret has fewer than 16 bytes.
    """
    if listening.family == socket.AF_UNIX or is_loopback(listening.getsockname()[0]) or len(secret) >= SHORTEST_SECRET:
        return
    raise ConfigError(
        f"listening at {where(listening.getsockname())} needs a secret of at least {SHORTEST_SECRET} bytes, found "
        f"{len(secret)}: other hosts can connect there. Start the job with the launcher, or listen on 127.0.0.1."
    )


def is_private(server: Any) -> bool:
    """Return whether what goes to a server's TCP address never leaves this host; both ends answer alike.

    Args:
        server: The server's end of the connection, as `getsockname` or `getpeername` shows it.
    """
    return is_loopback(_host(server))


def where(name: Any) -> str:
    """Return a socket's address as messages show it."""
    if isinstance(name, bytes | str):
        text = name.decode("utf-8", "replace") if isinstance(name, bytes) else name
        return text.replace("\0", "@") or "a process on this host"
    return str(Address(_host(name), name[1]))


def _host(name: Any) -> str:
    host = str(name[0])
    mapped = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(mapped, ipaddress.IPv6Address) and mapped.ipv4_mapped:
        return str(mapped.ipv4_mapped)
    return host
