"""`Log`: the write-ahead log of a server, in segments.

A log is a folder of segments `log-<number>`, each a sequence of records. A record is written whole before its request
is applied, so a full disk refuses the request and leaves the tables as they were. With durability `disk` an answer also
waits for an fsync; one fsync serves every record that was written before it began.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from phalanx.errors import BackendError
from phalanx.files import sync_directory
from phalanx.ps.snapshot.records import Array, Record, TornRecordError, pack, read_records

Durability = Literal["process", "disk"]

_log = logging.getLogger("phalanx.ps")
_NUMBER = re.compile(r"[0-9]{8,18}")
_BUFFERS = 512  # of one writev; the system takes at most 1024


def segments(directory: Path) -> dict[int, Path]:
    """Return the segments in a folder by number, in order."""
    paths = {p.name.removeprefix("log-"): p for p in directory.glob("log-*")}
    # Others may leave files here, as an editor or a copy does.
    return dict(sorted((int(number), path) for number, path in paths.items() if _NUMBER.fullmatch(number)))


def replay(directory: Path, first: int) -> Iterator[Record]:
    """Yield the records of the segments from number `first` on.

    A record that a crash cut off at the end of the last segment was not acknowledged: it is removed with a warning.

    Raises:
        DataError: If a segment is broken elsewhere; names file and offset.
    """
    paths = [path for number, path in segments(directory).items() if number >= first]
    for path in paths:
        try:
            yield from read_records(path)
        except TornRecordError as e:
            if path != paths[-1]:
                raise
            _log.warning("%s It was never answered and is removed.", e)
            os.truncate(path, e.offset)


class Log:
    """Appends records to the newest segment of a folder. All methods may be called by any thread.

    Args:
        directory: Where the segments are; made if missing. A new segment follows those there.
        durability: Whether an answered record outlives the process, or a power cut too.
    """

    def __init__(self, directory: Path, durability: Durability) -> None:
        self.directory = directory
        self.durability = durability
        directory.mkdir(parents=True, exist_ok=True)
        self.segment = max(segments(directory), default=0)
        self.bytes = sum(path.stat().st_size for path in segments(directory).values())
        """Bytes in all segments."""

        self._end = 0
        self._synced = 0
        self._failed: OSError | None = None
        self._syncing = False
        self._changed = threading.Condition()
        self._fd = -1
        self.rotate()

    @property
    def position(self) -> int:
        """Where the newest record ends, for `sync`."""
        with self._changed:
            return self._end

    def append(self, meta: dict[str, Any], arrays: Sequence[Array]) -> int:
        """Write a record and return a position to give to `sync`. One thread at a time.

        Raises:
            BackendError: If the disk does not take it; the log is then as it was before.
        """
        buffers: list[bytes | memoryview] = pack(meta, arrays)
        size = sum(len(b) for b in buffers)
        before = os.fstat(self._fd).st_size
        try:
            _write(self._fd, buffers)
        except OSError as e:
            os.ftruncate(self._fd, before)
            raise BackendError(self._refused(size, e)) from e
        with self._changed:
            self._end += size
            self.bytes += size
            return self._end

    def sync(self, position: int) -> None:
        """Wait until the record that ends at `position` is as durable as this log promises.

        Raises:
            BackendError: If an fsync failed: what the disk holds is then unknown, and so this server must end.
        """
        if self.durability == "process":
            return
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._syncing)
                if self._failed is not None:
                    raise BackendError(
                        f"{self.directory} could not be flushed to disk: {self._failed}. Replace the disk."
                    )
                if self._synced >= position:
                    return
                self._syncing, target, fd = True, self._end, self._fd
            self._flush(fd, target)

    def rotate(self) -> int:
        """Begin a new segment and return its number. No `append` may run beside it.

        Raises:
            OSError: If the disk takes no new file.
            BackendError: As `sync`.
        """
        self.sync(self._end)
        with self._changed:
            self._changed.wait_for(lambda: not self._syncing)
            path = self.directory / f"log-{self.segment + 1:08d}"
            new = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            if self._fd >= 0:
                os.close(self._fd)
            self.segment, self._fd = self.segment + 1, new
            if self.durability == "disk":
                sync_directory(self.directory)
            return self.segment

    def forget(self, before: int) -> None:
        """Delete the segments with numbers below `before`: a base snapshot holds what they say."""
        for number, path in segments(self.directory).items():
            if number < before:
                with self._changed:
                    self.bytes -= path.stat().st_size
                path.unlink()

    def close(self) -> None:
        """Flush what is written and close the newest segment."""
        self.sync(self._end)
        with self._changed:
            os.close(self._fd)
            self._fd = -1

    def _flush(self, fd: int, target: int) -> None:
        failed = None
        try:
            os.fsync(fd)
        except OSError as e:
            failed = e
        with self._changed:
            self._syncing = False
            self._failed = failed
            if failed is None:
                self._synced = max(self._synced, target)
            self._changed.notify_all()

    def _refused(self, size: int, error: OSError) -> str:
        free = shutil.disk_usage(self.directory).free
        return (
            f"A record of {size} bytes was to be written to the log in {self.directory}, which has {free} bytes free: "
            f"{error.strerror}. Nothing was changed; make room there and push again."
        )


def _write(fd: int, buffers: list[bytes | memoryview]) -> None:
    remaining = [memoryview(b) for b in buffers if len(b)]
    while remaining:
        written = os.writev(fd, remaining[:_BUFFERS])
        while remaining and written >= len(remaining[0]):
            written -= len(remaining.pop(0))
        if written:
            remaining[0] = remaining[0][written:]
