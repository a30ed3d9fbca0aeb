"""Make what was written outlast a power cut."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

_libc = ctypes.CDLL(None, use_errno=True)


def sync_file(file: IO[Any]) -> None:
    """Make what was written to an open file durable."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Make the names in a folder durable."""
    with _opened(directory) as fd:
        os.fsync(fd)


def sync_file_system(directory: Path) -> None:
    """Make all files of a folder durable with one call, instead of a thousand.

    Raises:
        OSError: If the disk did not take some of them.
    """
    with _opened(directory) as fd:
        if _libc.syncfs(fd) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(directory))


@contextmanager
def _opened(directory: Path) -> Iterator[int]:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)
