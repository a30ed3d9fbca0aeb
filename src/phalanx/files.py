"""`write_atomically`, `file_lock`: durable file operations: atomic writes, fsync of files and folders, file locks."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

_libc = ctypes.CDLL(None, use_errno=True)


def temporary_path(path: Path) -> Path:
    """Return the hidden file beside `path` that this process writes before it renames it."""
    return path.with_name(f".{path.name}.{os.getpid()}")


def write_atomically(path: Path, data: str | bytes, *, temporary: Path | None = None) -> None:
    """Write a file that a reader sees complete or not at all, and that is on disk when this returns.

    Args:
        path: The file; one that is there is replaced.
        data: Its content; text is UTF-8.
        temporary: File of the same folder to write first; `temporary_path(path)` when None.

    Raises:
        OSError: If the file system does not take it; `path` is then what it was, and the temporary file is removed.
    """
    with open_atomically(path, temporary=temporary) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextmanager
def open_atomically(path: Path, *, temporary: Path | None = None) -> Iterator[BinaryIO]:
    """Open a file for writing that appears under its name when the block ends well; see `write_atomically`."""
    part = temporary_path(path) if temporary is None else temporary
    try:
        with part.open("wb") as file:
            yield file
            sync_file(file)
        part.replace(path)
        sync_directory(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def sync_file(file: IO[Any]) -> None:
    """Make what was written to an open file durable."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Make the names in a folder durable."""
    with _open_directory(directory) as descriptor:
        os.fsync(descriptor)


def sync_file_system(directory: Path) -> None:
    """Make all files of a folder durable with one call, instead of a thousand.

    Raises:
        OSError: If the disk did not take some of them.
    """
    with _open_directory(directory) as descriptor:
        if _libc.syncfs(descriptor) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(directory))


@contextmanager
def _open_directory(directory: Path) -> Iterator[int]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def try_lock(path: Path) -> int | None:
    """Lock a file, created if missing, or a folder; None while another process has the lock.

    Returns:
        The descriptor that holds the lock. It may be passed to child processes; the kernel releases the lock when the
        last copy of the descriptor is closed, however the processes end.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY if path.is_dir() else os.O_RDWR | os.O_CREAT
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return descriptor


@contextmanager
def file_lock(path: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock of a file, created if missing, or of a folder; wait while another process holds it.

    Args:
        path: The file or folder.
        on_wait: Called once before waiting.
    """
    descriptor = try_lock(path)
    is_held = descriptor is not None
    if descriptor is None:
        if on_wait is not None:
            on_wait()
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if not is_held:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def liveness_lock(path: Path) -> Iterator[int | None]:
    """Lock a file, created if missing, to show that a process lives; yields None while another process has the lock.

    The descriptor may be given to a child, which then holds the lock until it has ended, as `try_lock` says.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = try_lock(path)
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)
