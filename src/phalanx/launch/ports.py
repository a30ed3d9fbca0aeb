"""Sockets bound before anything starts."""

from __future__ import annotations

import errno
import socket

from phalanx.cluster import messages, port_owner
from phalanx.errors import LaunchError


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
        held = port_owner.owner(port)
        return LaunchError(messages.text("port in use", flag=flag, port=port, address=address, owner=held))
    if error.errno == errno.EADDRNOTAVAIL:
        return LaunchError(f"{flag} {port}: {address} is not an address of this host. Correct the address.")
    return LaunchError(f"{flag} {port} on {address} cannot be bound ({error.strerror}). Choose another port.")
