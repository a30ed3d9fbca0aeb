"""`ControlSocket`: takes commands of this user for a job that runs, over a Unix socket: `phalanx scale` and others.

One JSON object a line: `{"scale": 3}` or `{"servers": "restart"}`, answered by `{"done": text}` or `{"error": text}`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.errors import LaunchError, PeerLostError

logger = logging.getLogger("phalanx.launch")

_LONGEST = 4096
_ANSWER_S = 10.0
_PATH_LIMIT = 107
"""Most bytes of a Unix socket's path (sun_path)."""


def read_scale(command: dict[str, Any]) -> int:
    """Return the number of ranks that a command asks for.

    Raises:
        LaunchError: If it is another command.
    """
    size = command.get("scale")
    if not isinstance(size, int) or isinstance(size, bool):
        raise LaunchError(f"{command} is no command of this version. Known: scale, with a whole number.")
    return size


class ControlSocket:
    """A socket that only this user can reach; a context that removes it."""

    def __init__(self, path: Path) -> None:
        """Listen at `path`, unless it is longer than a Unix socket's name may be."""
        self.path: Path | None = None
        self.answer: Callable[[dict[str, Any]], str] | None = None
        """Called with each command; returns what was done, or raises LaunchError. None while there is no attempt."""

        self._clients: list[socket.socket] = []
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening.setblocking(False)
        if len(os.fsencode(path)) > _PATH_LIMIT:
            logger.warning("commands will not reach this job: %s is too long for a socket", path)
            return
        before = os.umask(0o177)
        try:
            self._listening.bind(os.fspath(path))
            self._listening.listen()
            self.path = path
        except OSError as error:
            logger.warning("commands will not reach this job: %s: %s", path, error.strerror)
        finally:
            os.umask(before)

    def __enter__(self) -> ControlSocket:
        return self

    def __exit__(self, *_: object) -> None:
        for client in (*self._clients, self._listening):
            client.close()
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def register(self, ready: selectors.BaseSelector) -> None:
        """Add the sockets to what is waited for."""
        if self.path is None:
            return
        ready.register(self._listening, selectors.EVENT_READ, self._accept)
        for client in self._clients:
            ready.register(client, selectors.EVENT_READ, lambda client=client: self._serve(client))

    def _accept(self) -> None:
        try:
            client, _ = self._listening.accept()
        except BlockingIOError:
            return
        credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, uid, _ = struct.unpack("3i", credentials)
        if uid not in (os.getuid(), 0):
            client.close()
            return
        client.setblocking(False)
        self._clients.append(client)

    def _serve(self, client: socket.socket) -> None:
        try:
            data = client.recv(_LONGEST)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            with contextlib.suppress(OSError):
                client.send(json.dumps(self._reply(data)).encode())
        self._clients.remove(client)
        client.close()

    def _reply(self, data: bytes) -> dict[str, str]:
        try:
            command = json.loads(data)
        except ValueError:
            return {"error": "the command is no JSON"}
        if not isinstance(command, dict):
            return {"error": "the command is no JSON object"}
        if self.answer is None:
            return {"error": "The job is starting or ending. Ask again in a moment."}
        try:
            return {"done": self.answer(command)}
        except LaunchError as error:
            return {"error": str(error)}


def ask(path: str, command: dict[str, Any]) -> str:
    """Send a command to the job that listens at `path` and return what it says.

    Raises:
        LaunchError: If the job refuses.
        PeerLostError: If it has ended.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(_ANSWER_S)
        try:
            client.connect(path)
            client.send(json.dumps(command).encode())
            data = client.recv(_LONGEST)
        except OSError as error:
            raise PeerLostError(f"The job does not answer at {path} ({error.strerror or 'too late'}).") from None
    if not data:
        raise PeerLostError(f"The job at {path} ended before it answered.")
    answer: dict[str, str] = json.loads(data)
    if "error" in answer:
        raise LaunchError(answer["error"])
    return answer["done"]
