"""Network addresses, routes and port owners of this host, read from /proc without opening a socket."""

from __future__ import annotations

import ipaddress
import os
import struct
from pathlib import Path

from phalanx.cluster import proc
from phalanx.i18n import tr

ROUTES = Path("/proc/net/route")
ADDRESSES = Path("/proc/net/fib_trie")
_LISTENING = "0A"


def is_loopback(address: str) -> bool:
    """Return whether a numeric address (or `localhost`) only reaches this host."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
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
    matching: list[tuple[int, int, str]] = []
    for line in routes.splitlines()[1:]:
        name, destination, _, flags, _, _, metric, mask = line.split()[:8]
        network, bits = _from_table(destination), _from_table(mask)
        if int(flags, 16) & 1 and int(target) & bits == network:
            matching.append((bits.bit_count(), -int(metric), name))
    return max(matching)[2] if matching else None


def _from_table(field: str) -> int:
    """Read an address the kernel prints in the byte order of the machine."""
    return int(struct.unpack("!I", struct.pack("=I", int(field, 16)))[0])


def own_addresses(trie: str) -> set[str]:
    """Return the IPv4 addresses of this host, loopback's network left out.

    Args:
        trie: The kernel's table, as in `/proc/net/fib_trie`: an address, and in a line below it what it means.
    """
    addresses, last = set(), ""
    for line in trie.splitlines():
        words = line.split()
        if words[:1] == ["|--"]:
            last = words[1]
        elif words == ["/32", "host", "LOCAL"]:
            addresses.add(last)
    return addresses


def is_own(address: str) -> bool:
    """Return whether a numeric IPv4 address belongs to this host, as far as the system shows it."""
    return is_loopback(address) or address in own_addresses(ADDRESSES.read_text() if ADDRESSES.exists() else "")


def system_routes() -> str:
    """Return the kernel's IPv4 routes, empty where the system shows none."""
    return ROUTES.read_text() if ROUTES.exists() else ""


def port_owner(port: int) -> str:
    """Return `pid N (command)` of the process that holds a TCP port of this host, as far as we may see.

    Of several (a server and its connections) the one that listens is named.
    """
    for inodes in (_inodes(port, listening=True), _inodes(port, listening=False)):
        for entry in Path("/proc").iterdir():
            if inodes and entry.name.isdigit() and _holds(entry / "fd", inodes):
                return f"pid {entry.name} ({command_line(int(entry.name)) or 'unknown command'})"
    return tr("a process of another user or container")


def command_line(pid: int) -> str:
    """Return the command line of `pid`, or an empty string when it cannot be read."""
    return " ".join(proc.command_line(pid)).strip()


def _inodes(port: int, *, listening: bool) -> set[str]:
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if not os.path.exists(table):
            continue
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            is_wanted = int(fields[1].rpartition(":")[2], 16) == port and fields[9] != "0"
            if is_wanted and (fields[3] == _LISTENING or not listening):
                inodes.add(fields[9])
    return inodes


def _holds(folder: Path, inodes: set[str]) -> bool:
    try:
        entries = os.listdir(folder)
    except OSError:
        return False  # Another user's process, or one that just ended.
    return any(_inode_of(folder / entry) in inodes for entry in entries)


def _inode_of(descriptor: Path) -> str | None:
    try:
        target = os.readlink(descriptor)
    except OSError:
        return None  # Closed since it was listed; of this very process that is the listing's own.
    return target[8:-1] if target.startswith("socket:[") else None
