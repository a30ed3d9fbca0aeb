"""`LogReplay`: the state of a server, made from its newest base and the log after it, as recovery makes it."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

from phalanx.errors import DataError
from phalanx.ps.server.log import UNLOGGED, LogEntry, segments
from phalanx.ps.server.presence import read_server_number
from phalanx.ps.server.service import Service
from phalanx.ps.server.state import ServerState
from phalanx.ps.serving.log_tail import LogGoneError, LogTail
from phalanx.ps.snapshot.read import open_snapshot

_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, OverflowError)
"""Errors of reading what no server of ours wrote, though its checksums hold."""


class ReplayProgress(Enum):
    """How far a replay is."""

    CURRENT = "current"
    """It holds all that the log says now."""

    WAITS = "waits"
    """Tables were filled by what the log does not say; the server writes a base of it now."""

    ENDED = "ended"
    """It cannot continue: a newer base has to be loaded."""


class LogReplay:
    """Continues with the log for as long as that says everything. Tables may be read meanwhile.

    Args:
        directory: The server's folder.

    Raises:
        ConfigError: If no server keeps its log there.
        DataError: If the base is broken; names the file.
        LogGoneError: If another base took the place of the newest one meanwhile.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.number = read_server_number(directory)
        # It has the engine and the gate that a state needs; nobody asks it anything.
        self._service = Service(self.number.server, self.number.servers)
        self._unlogged_in: int | None = None
        self._is_broken = False
        segment = self._load_base()
        self._tail = LogTail(directory, segment)
        self.position = segment, 0
        """Segment and byte up to which the log is in the tables."""

    @property
    def state(self) -> ServerState:
        """What the server had at `position`."""
        return self._service.state

    def advance(self) -> ReplayProgress:
        """Apply what the log says now.

        Raises:
            DataError: If it is broken; names file and offset. It cannot continue after that.
        """
        if self._unlogged_in is not None:
            return self._look_for_base(self._unlogged_in)
        if self._is_broken:
            return ReplayProgress.ENDED
        self._is_broken = True  # unless this ends well: a record that was half applied is not passed over
        try:
            self._apply_new()
        except LogGoneError:
            return ReplayProgress.ENDED
        except _MALFORMED as error:
            raise DataError(
                f"The log in {self._directory} is broken after byte {self.position[1]} of segment {self.position[0]}: "
                f"a record cannot be applied ({error!r}). Start the job from a snapshot, in a folder of its own."
            ) from error
        self._is_broken = False
        return ReplayProgress.CURRENT if self._unlogged_in is None else self._look_for_base(self._unlogged_in)

    def changed_at(self) -> float:
        """Return when the newest record was written, in seconds since 1970."""
        return self._tail.written_at()

    def _apply_new(self) -> None:
        for record in self._tail.read():
            if record.meta.get("op") == UNLOGGED:
                self._unlogged_in = self._tail.segment
                return
            self.state.apply(LogEntry.of(record))
            self.position = self._tail.segment, record.end

    def _look_for_base(self, segment: int) -> ReplayProgress:
        return ReplayProgress.ENDED if _newest_base(self._directory)[0] > segment else ReplayProgress.WAITS

    def _load_base(self) -> int:
        """Fill the tables from the newest base; returns the first segment that it does not hold."""
        number, base = _newest_base(self._directory)
        if base is None:
            first = min(segments(self._directory), default=0)
            if first != 1:
                raise LogGoneError(f"{self._directory} has no base and no first segment yet.")
            return first
        try:
            snapshot = open_snapshot(base)
            self.state.restore(snapshot.manifest.extra)
            for table in self.state.tables.tables.values():
                snapshot.fill(table, self.state.shards)
        except (DataError, OSError, *_MALFORMED) as error:
            if _newest_base(self._directory)[0] != number:
                raise LogGoneError(f"{base} was replaced.") from None
            raise DataError(f"{base} does not hold the state of a server: {error}") from error
        return number


def _newest_base(directory: Path) -> tuple[int, Path | None]:
    """Return the newest base and its number, the first segment that it does not hold; (0, None) if there is none."""
    bases = {int(path.name.removeprefix("base-")): path for path in directory.glob("base-*") if path.suffix != ".part"}
    return max(bases.items(), default=(0, None))
