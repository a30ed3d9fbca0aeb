"""`ServerPresence`: says in a server's folder which server it is and that it runs, to those who follow its log."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import struct
import weakref
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from phalanx.errors import ConfigError, DataError
from phalanx.files import write_atomically
from phalanx.ps.table.placement import SHARDS

_FILE = "server.json"

_log = logging.getLogger("phalanx.ps")


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ServerNumber:
    """Which server of a job it is."""

    server: Annotated[int, Field(ge=0, lt=SHARDS)]
    servers: Annotated[int, Field(ge=1, le=SHARDS)]
    """How many there are."""


_number: TypeAdapter[ServerNumber] = TypeAdapter(ServerNumber)


class ServerPresence:
    """A file that is locked until this process ends, however it ends.

    Args:
        directory: The server's folder.
        server: Its number.
        servers: How many there are.
    """

    def __init__(self, directory: Path, server: int, servers: int) -> None:
        path = directory / _FILE
        write_atomically(path, json.dumps({"server": server, "servers": servers}))
        fd = os.open(path, os.O_RDONLY)
        self._close = weakref.finalize(self, os.close, fd)
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _lock(fcntl.F_RDLCK))
        except OSError as error:
            _log.warning("%s takes no locks (%s): who follows this server cannot see that it runs", path, error)

    def close(self) -> None:
        """Say that the server runs no more."""
        self._close()


def is_running(directory: Path) -> bool:
    """Return whether the server of a folder runs, on any machine that shares the folder."""
    try:
        with (directory / _FILE).open("rb") as file:
            answer = fcntl.fcntl(file, fcntl.F_OFD_GETLK, _lock(fcntl.F_WRLCK))
    except OSError:
        return False  # there is none, or nobody can lock
    return _kind(answer) != fcntl.F_UNLCK


def read_server_number(directory: Path) -> ServerNumber:
    """Return which server keeps its state in a folder.

    Raises:
        ConfigError: If none does.
        DataError: If the file that says so is broken.
    """
    path = directory / _FILE
    try:
        number = _number.validate_json(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            f"No parameter server keeps its log in {directory}. Start the job with --server-dir DIR or --max-restarts, "
            "and give that folder (LOG_DIR where --server-dir was left out)."
        ) from None
    except ValidationError as error:
        raise DataError(f"{path} does not say which server it is of. Start the server again.") from error
    if number.server >= number.servers:
        raise DataError(f"{path} is of server {number.server} of {number.servers}. Start the server again.")
    return number


# struct flock of Linux on 64-bit machines.
_FLOCK = struct.Struct("hhqqi4x")


def _lock(kind: int) -> bytes:
    """Return a lock of the whole file; an owner of 0 stands for the open file, which no fork and no thread shares."""
    return _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0)


def _kind(lock: bytes) -> int:
    kind: int = _FLOCK.unpack(lock)[0]
    return kind
