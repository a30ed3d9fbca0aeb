"""`LocalStore`: tables in this process, for jobs without servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from phalanx.ps.snapshot.participant import SnapshotParticipant
from phalanx.ps.snapshot.read import SnapshotSource
from phalanx.ps.snapshot.save import save_local
from phalanx.ps.stores.base import PendingRows, PullSpec, ReadyRows, TableReport
from phalanx.ps.stores.leases import Leases
from phalanx.ps.stores.tables import TableSet, get_table
from phalanx.ps.stores.update import TableUpdate, check_tables_once
from phalanx.ps.table.placement import SHARDS
from phalanx.ps.table.rules import TableSpec, check_same_spec
from phalanx.ps.table.table import make_table


class LocalStore:
    """A `TableStore` in this process. With one worker sync, async and bounded agree: a push is applied at once."""

    def __init__(self) -> None:
        self._tables = TableSet()
        self._leases = Leases()
        self._participant = SnapshotParticipant(self._tables.tables, range(SHARDS))
        self._source: SnapshotSource | None = None

    def declare(self, specs: Sequence[TableSpec]) -> None:
        """Make these tables, or check that they are there with the same specification. See `TableStore.declare`."""
        for spec in specs:
            if spec.name in self._tables.specs:
                check_same_spec(self._tables.specs[spec.name], spec)
            elif self._source is not None and spec.name in self._source.names:
                self._load_tables(self._source, [spec])
            else:
                self._tables.add(make_table(spec))

    def pull(self, pull_specs: Sequence[PullSpec], *, step: int = 0) -> PendingRows:
        """Read rows. See `TableStore.pull`."""
        return self._read(pull_specs)

    def push(
        self, updates: Sequence[TableUpdate], *, step: int = 0, weight: float = 1.0, then: Sequence[PullSpec] = ()
    ) -> PendingRows:
        """Apply changes. See `TableStore.push`."""
        check_tables_once(updates)
        for update in updates:
            self._tables.check(update)
        self._tables.require_room(update.table for update in updates)
        for update in updates:
            self._tables.apply(update)
        return self._read(then)

    def flush(self) -> None:
        """Do nothing: a push is applied when it returns."""

    def leave(self) -> None:
        """Do nothing: nobody waits for this worker."""

    def report(self) -> dict[str, TableReport]:
        """Return counts by table name."""
        return {name: TableReport(**counts) for name, counts in self._tables.report().items()}

    def shrink(self, table: str) -> int:
        """End a day. See `TableStore.shrink`."""
        return get_table(self._tables.tables, table).shrink()

    def lease(self, epoch: int, files: Sequence[str]) -> tuple[str | None, int, int]:
        """Return the next file of an epoch. See `TableStore.lease`."""
        self._leases.check(epoch, files)
        lease = self._leases.lease(0, epoch, files)
        return lease["file"], lease["offset"], lease["left"]

    def report_progress(self, epoch: int, file: str, offset: int, *, end: bool = True) -> None:
        """Report progress on a leased file. See `TableStore.report_progress`."""
        self._leases.check_progress(0, epoch, file, offset)
        self._leases.record_progress(epoch, file, offset, end=end)

    def save(self, directory: Path, extra: Mapping[str, object], *, mode: str = "full") -> None:
        """Write a snapshot. See `TableStore.save`."""
        save_local(self._participant, directory, extra, mode)

    def load(self, directory: Path, names: Sequence[str] | None = None) -> dict[str, object]:
        """Read a snapshot; tables of it that are declared later get their rows then. See `TableStore.load`."""
        source = SnapshotSource(directory, names)
        self._load_tables(source, [spec for name, spec in self._tables.specs.items() if name in source.names])
        self._source = source
        return source.snapshot.extra()

    def close(self) -> None:
        """Let go of the tables."""
        self._tables.tables.clear()

    def _read(self, pull_specs: Sequence[PullSpec]) -> ReadyRows:
        return ReadyRows([self._tables.pull(pull_spec.table, pull_spec.keys) for pull_spec in pull_specs])

    def _load_tables(self, source: SnapshotSource, specs: Sequence[TableSpec]) -> None:
        self._tables.load(source, specs, range(SHARDS))
        self._participant.remember_load(source, [spec.name for spec in specs])
