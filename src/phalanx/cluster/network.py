"""Pure questions about addresses, answered from the tables the system shows; nothing here opens a socket."""

from __future__ import annotations

import ipaddress
import struct
from pathlib import Path

ROUTES = Path("/proc/net/route")


def is_loopback(address: str) -> bool:
    """Return whether a numeric address (or `localhost`) only reaches this host."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def is_wildcard(address: str) -> bool:
    """Return whether a numeric address means every interface, which no peer can connect to."""
    try:
        return ipaddress.ip_address(address).is_unspecified
    except ValueError:
        return False


def interface_towards(address: str, routes: str) -> str | None:
    """Return the network interface that leads to a numeric IPv4 address.

    Args:
        address: Where packets should go.
        routes: The kernel's table, as in `/proc/net/route`.

    Returns:
        Name of the interface, by the longest matching prefix and then the lowest metric; None without a route or for
        IPv6.
    """
    if is_loopback(address):
        return "lo"
    target = ipaddress.ip_address(address)
    if target.version != 4:
        return None
    found: list[tuple[int, int, str]] = []
    for line in routes.splitlines()[1:]:
        name, destination, _, flags, _, _, metric, mask = line.split()[:8]
        network, bits = _from_table(destination), _from_table(mask)
        if int(flags, 16) & 1 and int(target) & bits == network:
            found.append((bits.bit_count(), -int(metric), name))
    return max(found)[2] if found else None


def _from_table(field: str) -> int:
    """Read an address the kernel prints in the byte order of the machine."""
    return int(struct.unpack("!I", struct.pack("=I", int(field, 16)))[0])


def system_routes() -> str:
    """Return the kernel's IPv4 routes, empty where the system shows none."""
    return ROUTES.read_text() if ROUTES.exists() else ""
