"""`LogFile`: redirect stdout and stderr of a rank to its log file, tolerating a full disk."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TYPE_CHECKING

from phalanx.cluster.disk_space import is_full
from phalanx.i18n import tr

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class LogFile(io.FileIO):
    """A descriptor that loses output rather than fail when its file system is full: a line is not worth a training."""

    def __init__(self, descriptor: int, name: str) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.name = name
        self._lost = 0

    def write(self, data: ReadableBuffer, /) -> int:
        """Write as `io.FileIO` does; without room, count what is lost, and say how much when there is room again."""
        size = memoryview(data).nbytes
        try:
            if self._lost:
                message = tr(
                    "[phalanx] {bytes} bytes of output are missing here: the file system was full", bytes=self._lost
                )
                super().write(f"\n{message}\n".encode())
                self._lost = 0
            return super().write(data)
        except OSError as error:
            if not is_full(error):
                raise
            self._lost += size
            return size


def redirect(path: str) -> None:
    """Send standard output and error of this process to a log file, and empty its standard input."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.close(null)
    sys.stdout = sys.__stdout__ = _stream(1, "<stdout>", sys.stdout.encoding)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2, "<stderr>", sys.stderr.encoding)  # type: ignore[misc]


def _stream(descriptor: int, name: str, encoding: str) -> io.TextIOWrapper:
    raw = io.BufferedWriter(LogFile(descriptor, name))
    return io.TextIOWrapper(raw, encoding=encoding, errors="backslashreplace", line_buffering=True)


def flush() -> None:
    """Flush both streams; closed by the script, there is nothing more to save."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError):
            stream.flush()
