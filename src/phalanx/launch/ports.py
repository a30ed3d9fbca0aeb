"""Sockets bound before anything starts, and who holds a port that is taken."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from phalanx.errors import LaunchError
from phalanx.launch.processes import command_line


def bind(address: str, port: int, *, flag: str, listen: bool = False) -> socket.socket:
    """Return a TCP socket bound to `address`.

    Args:
        address: An address of this host.
        port: Port, or 0 for one the system chooses.
        flag: What asked for the port, for the message.
        listen: Whether to listen at once, so that early clients wait instead of being refused.

    Raises:
        LaunchError: If the port is taken; names the process that has it.
    """
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        if port:
            # A run that just ended leaves its fixed port in TIME_WAIT. For port 0 the option would let the
            # system hand out a port that another bound, not yet listening socket has.
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((address, port))
        if listen:
            made.listen(1024)
    except OSError as error:
        made.close()
        raise _bind_error(address, port, flag, error) from None
    return made


def _bind_error(address: str, port: int, flag: str, error: OSError) -> LaunchError:
    if error.errno == errno.EADDRINUSE:
        return LaunchError(
            f"{flag} {port} on {address} is in use by {owner(port)}. End that process, or choose another port."
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return LaunchError(f"{flag} {port}: {address} is not an address of this host. Correct the address.")
    return LaunchError(f"{flag} {port} on {address} cannot be bound ({error.strerror}). Choose another port.")


def owner(port: int) -> str:
    """Return `pid N (command)` of the process that holds a TCP port of this host, as far as we may see."""
    inodes = _inodes(port)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _holds(entry / "fd", inodes):
            return f"pid {entry.name} ({command_line(int(entry.name)) or 'unknown command'})"
    return "a process of another user or container"


def _inodes(port: int) -> set[str]:
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if not os.path.exists(table):
            continue
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if int(fields[1].rpartition(":")[2], 16) == port and fields[9] != "0":
                found.add(fields[9])
    return found


def _holds(folder: Path, inodes: set[str]) -> bool:
    try:
        targets = [os.readlink(entry) for entry in folder.iterdir()]
    except OSError:
        return False  # Another user's process, or one that just ended.
    return any(target[:8] == "socket:[" and target[8:-1] in inodes for target in targets)
