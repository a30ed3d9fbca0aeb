"""JSON messages and file descriptors over a Unix socket pair (SCM_RIGHTS)."""

from __future__ import annotations

import array
import json
import os
import socket
from collections.abc import Sequence
from typing import Any

_LARGEST = 1 << 20
_MOST_FDS = 8


def pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected ends that keep message borders and can carry descriptors."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LARGEST)
    return ends


def send(end: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one message and copies of `fds`; blocks while the other end is behind.

    Raises:
        BrokenPipeError: If the other end is gone.
    """
    data = json.dumps(message).encode()
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    end.sendmsg([data], ancillary)


def receive(end: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Receive one message and its descriptors (close-on-exec), or None when the other end is gone.

    Raises:
        BlockingIOError: If the socket does not block and nothing is there.
    """
    space = socket.CMSG_LEN(_MOST_FDS * array.array("i").itemsize)
    try:
        data, ancillary, _, _ = end.recvmsg(_LARGEST, space)
    except ConnectionResetError:
        # The other end left without reading all we sent. That is reported first, once; what it sent comes after.
        data, ancillary, _, _ = end.recvmsg(_LARGEST, space)
    if not data:
        return None
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    for fd in fds:
        os.set_inheritable(fd, False)
    return json.loads(data), list(fds)
