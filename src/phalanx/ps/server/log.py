"""`Log`, `LogEntry`: the write-ahead log of a server, in segments, and one request in it.

A log is a folder of segments `log-<number>`, each a sequence of records. A record is written whole before its request
is applied, so a full disk refuses the request and leaves the tables as they were. With durability `disk` an answer also
waits for an fsync; one fsync serves every record that was written before it began.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from phalanx._core import ServerLog
from phalanx.files import sync_directory
from phalanx.ps.snapshot.records import Array, Record, TornRecordError, pack, read_records
from phalanx.ps.stores.update import TableUpdate, unpack_updates

Durability = Literal["process", "disk"]

_log = logging.getLogger("phalanx.ps")
_NUMBER = re.compile(r"[0-9]{8,18}")


def segments(directory: Path) -> dict[int, Path]:
    """Return the segments in a folder by number, in order."""
    paths = {p.name.removeprefix("log-"): p for p in directory.glob("log-*")}
    # Others may leave files here, as an editor or a copy does.
    return dict(sorted((int(number), path) for number, path in paths.items() if _NUMBER.fullmatch(number)))


def log_bytes(directory: Path, first: int) -> int:
    """Return the bytes of the segments from number `first` on."""
    return sum(path.stat().st_size for number, path in segments(directory).items() if number >= first)


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

    The native log (`csrc/server_log.h`) writes; pushes get there natively.

    Args:
        directory: Where the segments are; made if missing. A new segment follows those there.
        durability: Whether an answered record outlives the process, or a power cut too.
    """

    def __init__(self, directory: Path, durability: Durability) -> None:
        self.directory = directory
        self.durability = durability
        directory.mkdir(parents=True, exist_ok=True)
        self.segment = max(segments(directory), default=0)
        self._kept = sum(path.stat().st_size for path in segments(directory).values())
        self.native = ServerLog(str(directory), durability == "disk")
        self.rotate()

    @property
    def bytes(self) -> int:
        """Bytes in all segments."""
        return self._kept + self.native.position

    @property
    def position(self) -> int:
        """Where the newest record ends, for `sync`."""
        return self.native.position

    def append(self, meta: dict[str, Any], arrays: Sequence[Array]) -> int:
        """Write a record and return a position to give to `sync`. One thread at a time.

        Raises:
            BackendError: If the disk does not take it; the log is then as it was before.
        """
        return self.native.append(pack(meta, arrays))

    def sync(self, position: int) -> None:
        """Wait until the record that ends at `position` is as durable as this log promises.

        Raises:
            BackendError: If an fsync failed: what the disk holds is then unknown, and so this server must end.
        """
        self.native.sync(position)

    def rotate(self) -> int:
        """Begin a new segment and return its number. No `append` may run beside it.

        Raises:
            OSError: If the disk takes no new file.
            BackendError: As `sync`.
        """
        self.native.open(str(self.directory / f"log-{self.segment + 1:08d}"))
        self.segment += 1
        if self.durability == "disk":
            sync_directory(self.directory)
        return self.segment

    def forget(self, before: int) -> None:
        """Delete the segments with numbers below `before`: a base snapshot holds what they say."""
        for number, path in segments(self.directory).items():
            if number < before:
                self._kept -= path.stat().st_size
                path.unlink()

    def close(self) -> None:
        """Flush what is written and close the newest segment."""
        self.native.close()


UNLOGGED = "unlogged"
"""Operation of an entry which says that tables now hold what the log does not; the next base does."""


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One checked request."""

    op: str
    client: int
    seq: int
    meta: Mapping[str, Any]
    """Of a push: `step` and `weight`."""

    updates: Sequence[TableUpdate] = ()
    """Of a push."""

    def record(self) -> dict[str, Any]:
        """Return the JSON object of the record of a request of control; the engine writes those of pushes."""
        return {"op": self.op, "client": self.client, "seq": self.seq, "meta": self.meta}

    @classmethod
    def of(cls, record: Record) -> LogEntry:
        """Return the entry in a record."""
        meta = dict(record.meta["meta"])
        updates = unpack_updates(meta.pop("changes", ()), record.arrays) if record.meta["op"] == "push" else ()
        return cls(record.meta["op"], record.meta["client"], record.meta["seq"], meta, updates)
