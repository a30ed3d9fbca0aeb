"""`Recovery`: restore a server after a crash from a base snapshot and the write-ahead log.

    <directory>/job             whose state it is
    <directory>/server.json     which server it is, locked while it runs
    <directory>/base-<n>/       a snapshot of this server alone: all that came before segment n of the log
    <directory>/log-<n>, ...    what came after

The base is written beside the training when the log has outgrown the tables, and then the log before it goes.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from pathlib import Path
from typing import Any

from phalanx.errors import BackendError, ClosedError, DataError, PhalanxError
from phalanx.files import sync_directory, write_atomically
from phalanx.ps.server.log import Durability, Log, LogEntry, log_bytes, replay
from phalanx.ps.server.presence import ServerPresence
from phalanx.ps.server.service import Service
from phalanx.ps.server.snapshots.snapshot_service import SnapshotService
from phalanx.ps.server.snapshots.snapshot_writer import SnapshotWriter
from phalanx.ps.snapshot.manifest import SnapshotFile, SnapshotManifest, write_manifest
from phalanx.ps.snapshot.read import open_snapshot
from phalanx.ps.snapshot.write import WriteRequest
from phalanx.ps.table.rules import TableSpec
from phalanx.ps.wire.progress import WORK_REPORT_S

logger = logging.getLogger("phalanx.ps")

_MALFORMED = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError)
"""Errors of reading what no server of ours wrote, though its checksums hold."""


class Recovery:
    """Keeps a server's state on disk, and gives it back to a server that was started again.

    Args:
        service: The server.
        snapshots: Its part in snapshots.
        directory: Where the state is.
        durability: Whether an answered push outlives the process, or a power cut too.
        log_bytes: Least size of the log at which a base snapshot is written; the log may also grow as large as the
            tables.
    """

    def __init__(
        self,
        service: Service,
        snapshots: SnapshotService,
        directory: Path,
        durability: Durability = "process",
        *,
        log_bytes: int = 256 << 20,
    ) -> None:
        self._service, self._snapshots, self.directory, self._durability = service, snapshots, directory, durability
        self._least_bytes = self._next_bytes = log_bytes
        self._writer: SnapshotWriter | None = None
        self._presence: ServerPresence | None = None
        self._writing = threading.Lock()
        self._segment = 0
        self._state: dict[str, Any] = {}
        self._tables: dict[str, TableSpec] = {}

    def recover(self, job: str = "") -> bool:
        """Give the service the state on disk, if there is one of this job, and log from here on; returns whether.

        Args:
            job: Name of the job. The state of another job is moved aside: its steps mean nothing to this one.

        Raises:
            DataError: If the state is broken; names file and offset.
        """
        self._claim(job)
        started, progress = time.monotonic(), self._service.state.progress
        segment = self._load_base()
        count = 0
        progress.expect(log_bytes(self.directory, segment), "bytes of the log")
        for record in replay(self.directory, segment):
            try:
                self._service.state.apply(LogEntry.of(record))
            except _MALFORMED as error:
                raise DataError(
                    f"The log in {self.directory} is broken: change {count + 1} after segment {segment}, at byte "
                    f"{record.offset}, cannot be applied ({error!r}). Start from a snapshot in a folder of its own."
                ) from error
            count += 1
            progress.add(record.end - record.offset)
        self._service.log = Log(self.directory, self._durability)
        self._service.write_base = self.write_base
        self._journal.forget(segment)
        self._tidy(segment)
        self._presence = ServerPresence(self.directory, self._service.state.server, self._service.state.servers)
        self._write_owed_base()
        if segment or count:
            rows = sum(table.rows for table in self._service.state.tables.tables.values())
            took = time.monotonic() - started
            logger.info("recovered from %s: %d rows, %d logged changes, %.1f s", self.directory, rows, count, took)
        return bool(segment or count)

    def write_base(self) -> None:
        """Write a base snapshot and return when it is there and the log before it gone.

        Raises:
            BackendError: If the disk does not take it.
        """
        with self._writing:
            if self._writer is not None:
                self._end()  # begun before what is to be written now
            self._begin()
            self._watch_writer()
            self._end()

    def tick(self) -> None:
        """Begin a base snapshot when the log is long, and end one that is written. Called now and then."""
        try:
            with self._writing:
                if self._writer is not None:
                    if self._writer.wait(0):
                        self._end()
                elif self._journal.bytes > max(self._next_bytes, self._service.state.tables.bytes):
                    self._begin()
        except PhalanxError as e:
            # The log continues and holds everything; a base is tried again when it has grown further.
            logger.warning("no base snapshot was written: %s", e)
            self._next_bytes = self._journal.bytes + self._least_bytes

    def close(self) -> None:
        """Give up a base that is not whole, for which the log still holds all, and close the log if there is one."""
        if self._writer is not None:
            self._writer.stop()
            self._writer.wait()
        if self._service.log is not None:
            self._service.log.close()
        if self._presence is not None:
            self._presence.close()

    @property
    def _journal(self) -> Log:
        assert self._service.log is not None
        return self._service.log

    def _claim(self, job: str) -> None:
        path = self.directory / "job"
        if path.exists() and path.read_text() != job:
            aside = self.directory.with_name(self.directory.name + ".previous")
            shutil.rmtree(aside, ignore_errors=True)
            self.directory.rename(aside)
            logger.warning("%s held the state of another job; it is now in %s", self.directory, aside)
        self.directory.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            # In one step: half a name would look like another job's, and the state be moved aside.
            write_atomically(path, job)

    def _write_owed_base(self) -> None:
        """Write the base that a server which was killed still owes to those who follow its log."""
        try:
            self._service.write_owed_base()
        except BackendError as error:
            # It is tried again before the next change of control is answered.
            logger.warning("no base snapshot was written: %s", error)

    def _load_base(self) -> int:
        """Fill the tables from the newest base; returns the first segment that it does not hold."""
        bases = sorted(path for path in self.directory.glob("base-*") if path.suffix != ".part")
        if not bases:
            return 0
        snapshot, progress = open_snapshot(bases[-1]), self._service.state.progress
        state = snapshot.manifest.extra
        progress.expect(sum(snapshot.manifest.rows.values()), "rows")
        try:
            self._service.state.restore(state)
            for table in self._service.state.tables.tables.values():
                snapshot.fill(table, self._service.state.shards, progress)
            self._snapshots.restore(state["saving"])
            return int(bases[-1].name.removeprefix("base-"))
        except _MALFORMED as error:
            raise DataError(
                f"{bases[-1]} does not hold the state of a server ({error!r}). Start from a snapshot in a folder of "
                "its own."
            ) from error

    def _begin(self) -> None:
        service = self._service
        try:
            with service.write_freeze.change():
                if service.stopped.is_set():  # perhaps in the midst of a push, which must not come into a base
                    raise ClosedError("This server is stopping. Start the job again to continue.")
                self._segment = self._journal.rotate()
                service.engine.append_pending()
                state = {**service.state.to_json(), "saving": self._snapshots.to_json()}
                part = self._part
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir()
                self._writer = self._snapshots.begin(
                    WriteRequest(part, "00000000", "full", service.state.shards, service.state.server)
                )
                self._state, self._tables = state, dict(service.state.tables.specs)
        except OSError as e:
            raise BackendError(f"{self.directory} takes no base snapshot: {e.strerror}. Make room there.") from e

    def _watch_writer(self) -> None:
        """Wait until the base is written; whoever waits for it is told how far it is."""
        assert self._writer is not None
        progress = self._service.state.progress
        progress.expect(self._service.state.tables.bytes, "bytes of a base snapshot")
        while not self._writer.wait(WORK_REPORT_S):
            progress.add(sum(path.stat().st_size for path in self._part.iterdir()) - progress.done)

    def _end(self) -> None:
        writer, self._writer = self._writer, None
        assert writer is not None
        try:
            written = writer.result()
            files = {number: SnapshotFile(*facts) for number, facts in written["files"].items()}
            manifest = SnapshotManifest("00000000", "full", self._tables, written["rows"], files, self._state)
            write_manifest(self._part, manifest)
            self._part.rename(self._part.with_suffix(""))
            sync_directory(self.directory)
        except DataError as e:
            # A disk has lost rows of tables. A server that is started again has them from the last base and the log.
            raise self._service.fail(e) from None
        except OSError as e:
            raise BackendError(f"{self.directory} takes no base snapshot: {e.strerror}. Make room there.") from e
        self._journal.forget(self._segment)
        self._tidy(self._segment)
        self._next_bytes = self._least_bytes

    @property
    def _part(self) -> Path:
        return self.directory / f"base-{self._segment:08d}.part"

    def _tidy(self, segment: int) -> None:
        """Delete bases that are not the newest, or were not finished."""
        for path in self.directory.glob("base-*"):
            if path.name != f"base-{segment:08d}":
                shutil.rmtree(path)
