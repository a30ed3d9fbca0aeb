"""`LogTail`: the records of a server's log, read while they are written."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

from phalanx.errors import PhalanxError
from phalanx.ps.snapshot.records import Record, TornRecordError, read_open_file


class LogGoneError(PhalanxError):
    """The log before a position is no more: a base holds what it said, or another job began."""


class LogTail:
    """Reads the log of a server in its order. It needs nothing of the server but its folder.

    Args:
        directory: The server's folder.
        segment: Number of the segment to begin with.

    Raises:
        LogGoneError: If there is no such segment any more.
    """

    def __init__(self, directory: Path, segment: int) -> None:
        self._directory = directory
        self._job = self._read_job()
        self.offset = 0
        self._close: Callable[[], object] = lambda: None
        self._open(segment)

    def read(self) -> Iterator[Record]:
        """Yield the records that are there and were not read yet.

        Raises:
            LogGoneError: If the log continues elsewhere.
            DataError: If a segment is broken; names file and offset.
        """
        while True:
            # In this order: a segment that has a next one has ended.
            has_ended = self._path(self.segment + 1).exists()
            yield from self._read_segment(has_ended)
            if not has_ended:
                break
            if self._read_job() != self._job:
                raise LogGoneError(f"{self._directory} holds the log of another job.")
            self._open(self.segment + 1)
        self._check_place()

    def written_at(self) -> float:
        """Return when the open segment was last written, in seconds since 1970."""
        return os.fstat(self._fd).st_mtime

    def _read_segment(self, has_ended: bool) -> Iterator[Record]:
        size = os.fstat(self._fd).st_size
        if size < self.offset:
            raise LogGoneError(f"{self._path(self.segment)} lost what it held: its machine was switched off.")
        if size == self.offset:
            return
        # A new buffer each time: what was half written at the last look is read again.
        with os.fdopen(os.dup(self._fd), "rb") as file:
            file.seek(self.offset)
            try:
                for record in read_open_file(file, self._path(self.segment)):
                    self.offset = record.end
                    yield record
            except TornRecordError:
                if has_ended:
                    raise

    def _open(self, segment: int) -> None:
        try:
            fd = os.open(self._path(segment), os.O_RDONLY)
        except FileNotFoundError:
            raise LogGoneError(f"{self._path(segment)} is no more.") from None
        self._close()
        self._fd, self.segment, self.offset = fd, segment, 0
        self._close = weakref.finalize(self, os.close, fd)

    def _check_place(self) -> None:
        """Raise if the open segment is not that of the folder any more, and none follows it."""
        path = self._path(self.segment)
        try:
            is_same = path.stat().st_ino == os.fstat(self._fd).st_ino
        except FileNotFoundError:
            is_same = self._path(self.segment + 1).exists()
        if not is_same:
            raise LogGoneError(f"{path} was replaced.")

    def _read_job(self) -> str:
        try:
            return (self._directory / "job").read_text(encoding="utf-8")
        except FileNotFoundError:
            raise LogGoneError(f"{self._directory} was moved aside.") from None

    def _path(self, segment: int) -> Path:
        return self._directory / f"log-{segment:08d}"
