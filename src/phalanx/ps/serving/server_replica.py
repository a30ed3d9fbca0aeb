"""`ServerReplica`: the tables of one server, kept current from its log."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from phalanx.errors import ConfigError
from phalanx.ps.server.presence import is_running, read_server_number
from phalanx.ps.serving.log_replay import LogReplay, ReplayProgress
from phalanx.ps.serving.log_tail import LogGoneError
from phalanx.ps.table.table import RowTable


class ServerReplica:
    """A copy of a server's tables. One thread polls; any number may read.

    Args:
        directory: The server's folder.

    Raises:
        ConfigError: If no server keeps its log there.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._number = read_server_number(directory)
        self._replay: LogReplay | None = None
        self._newer: LogReplay | None = None
        self.as_of = 0.0
        """Until when every change is in the tables, in seconds since 1970."""

    @property
    def tables(self) -> Mapping[str, RowTable]:
        """Tables by name; none before the first poll that reaches the end of the log."""
        return {} if self._replay is None else dict(self._replay.state.tables.tables)

    @property
    def version(self) -> str:
        """Segment and byte of the log up to which it is in the tables."""
        return "0.0" if self._replay is None else ".".join(map(str, self._replay.position))

    @property
    def steps(self) -> Sequence[int]:
        """Pushes of each worker that the rows hold."""
        clocks = None if self._replay is None else self._replay.state.clocks
        return [] if clocks is None else clocks.applied_steps

    def poll(self) -> None:
        """Apply what the log says now. What has to begin anew is made beside the tables that are read.

        Raises:
            ConfigError: If the job now has another number of servers.
            DataError: If the log or a base is broken; names the file.
        """
        now, runs = time.time(), is_running(self.directory)  # before the log is read
        replay = self._newer or self._replay
        progress = ReplayProgress.ENDED if replay is None else replay.advance()
        if progress is ReplayProgress.ENDED:
            replay = self._newer = self._begin()
            progress = ReplayProgress.ENDED if replay is None else replay.advance()
        if replay is not None and progress is ReplayProgress.CURRENT and self._may_read(replay):
            self._replay, self._newer = replay, None
            # Of a server that does not run nobody knows what it would say now.
            self.as_of = now if runs else max(self.as_of, replay.changed_at())

    def _may_read(self, replay: LogReplay) -> bool:
        """Whether a replay takes the place of the tables that are read: not while a new job has declared none."""
        return self._replay in (None, replay) or bool(replay.state.tables.tables)

    def restart(self) -> None:
        """Begin anew from the newest base at the next poll, and keep the tables until it is there."""
        self._newer = self._begin()

    def _begin(self) -> LogReplay | None:
        try:
            replay = LogReplay(self.directory)
        except LogGoneError:
            return None  # the server is changing its files: they are there at the next poll
        if replay.number != self._number:
            raise ConfigError(
                f"{self.directory} was of server {self._number.server} of {self._number.servers}, and is now of server "
                f"{replay.number.server} of {replay.number.servers}. Start phalanx serve-table again."
            )
        return replay
