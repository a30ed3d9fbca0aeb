"""JSON messages and file descriptors over a Unix socket pair (SCM_RIGHTS)."""

from __future__ import annotations

import array
import json
import os
import socket
from collections.abc import Sequence
from typing import Any

from phalanx.errors import InternalError

SERVER_FD = 3
"""Descriptor on which the launcher hands the fork server its end of the socket."""

_LARGEST = 1 << 20
_LARGEST_FILE = 64 << 20
_INLINE = 64 << 10
"""Most bytes that go through the socket; the system's own limit depends on its settings."""

_IN_FILE = b"file"
"""In place of a message that lies in a file, whose descriptor comes first."""

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
    if len(data) <= _INLINE:
        _send(end, data, fds)
        return
    # What failed on a hundred hosts is more than a socket takes as one message.
    with open(os.memfd_create("phalanx-message", os.MFD_CLOEXEC), "wb") as file:
        file.write(data)
        file.flush()
        _send(end, _IN_FILE, [file.fileno(), *fds])


def _send(end: socket.socket, data: bytes, fds: Sequence[int]) -> None:
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    end.sendmsg([data], ancillary)


def receive(end: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Receive one message and its descriptors (close-on-exec), or None when the other end is gone.

    Raises:
        BlockingIOError: If the socket does not block and nothing is there.
        InternalError: If it is no message of ours: both ends are processes that this package started.
    """
    space = socket.CMSG_LEN(_MOST_FDS * array.array("i").itemsize)
    try:
        data, ancillary, flags, _ = end.recvmsg(_LARGEST, space)
    except ConnectionResetError:
        # The other end left without reading all we sent. That is reported first, once; what it sent comes after.
        data, ancillary, flags, _ = end.recvmsg(_LARGEST, space)
    if not data:
        return None
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    for fd in fds:
        os.set_inheritable(fd, False)
    if data == _IN_FILE and fds:
        data = _read_file(fds.pop(0))
    try:
        message = json.loads(data)
        is_whole = isinstance(message, dict) and not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
    except (ValueError, RecursionError):
        is_whole = False
    if not is_whole:
        for fd in fds:
            os.close(fd)
        raise InternalError(f"A process of the launcher sent {data[:40]!r}..., {len(data)} bytes. Please report it.")
    return message, list(fds)


def _read_file(fd: int) -> bytes:
    with open(fd, "rb") as file:
        return os.pread(file.fileno(), min(os.fstat(file.fileno()).st_size, _LARGEST_FILE), 0)
