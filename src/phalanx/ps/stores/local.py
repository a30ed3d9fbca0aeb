"""Tables in this process: what a job without servers trains, and the reference of every mode."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from phalanx.errors import ConfigError
from phalanx.ps.snapshot.holder import Holder
from phalanx.ps.snapshot.read import Source
from phalanx.ps.snapshot.save import save_local
from phalanx.ps.stores.base import Change, Pulled, Ready, TableReport, Want, named
from phalanx.ps.stores.leases import Leases
from phalanx.ps.stores.tables import Tables
from phalanx.ps.table.placement import SHARDS
from phalanx.ps.table.rules import TableSpec
from phalanx.ps.table.table import make_table, read_rows


class LocalStore:
    """A `Store` whose tables are here. With one worker sync, async and bounded agree: a push is applied at once."""

    def __init__(self) -> None:
        self._tables = Tables()
        self._leases = Leases()
        self._holder = Holder(self._tables.tables, range(SHARDS))
        self._source: Source | None = None

    def declare(self, specs: Sequence[TableSpec]) -> None:
        """Make these tables, or check that they are there with the same specification. See `Store.declare`."""
        for spec in specs:
            if spec.name in self._tables.specs:
                check_same(self._tables.specs[spec.name], spec)
            elif self._source is not None and spec.name in self._source.names:
                self._put(self._source, [spec])
            else:
                self._tables.put(make_table(spec))

    def pull(self, wants: Sequence[Want], *, step: int = 0) -> Pulled:
        """Read rows. See `Store.pull`."""
        return self._read(wants)

    def push(
        self, changes: Sequence[Change], *, step: int = 0, weight: float = 1.0, then: Sequence[Want] = ()
    ) -> Pulled:
        """Apply changes. See `Store.push`."""
        for change in changes:
            named(self._tables.tables, change.table)
            self._tables.apply(change)
        return self._read(then)

    def flush(self) -> None:
        """Do nothing: a push is applied when it returns."""

    def leave(self) -> None:
        """Do nothing: nobody waits for this worker."""

    def report(self) -> dict[str, TableReport]:
        """Return counts by table name."""
        return {name: TableReport(**counts) for name, counts in self._tables.report().items()}

    def shrink(self, table: str) -> int:
        """End a day. See `Store.shrink`."""
        return named(self._tables.tables, table).shrink()

    def lease(self, epoch: int, files: Sequence[str]) -> tuple[str | None, int, int]:
        """Return the next file of an epoch. See `Store.lease`."""
        self._leases.check(epoch, files)
        given = self._leases.lease(0, epoch, files)
        return given["file"], given["offset"], given["left"]

    def done(self, epoch: int, file: str, offset: int, *, end: bool = True) -> None:
        """Report progress on a leased file. See `Store.done`."""
        self._leases.check_done(0, epoch, file, offset)
        self._leases.done(epoch, file, offset, end=end)

    def save(self, directory: Path, extra: Mapping[str, object], *, mode: str = "full") -> None:
        """Write a snapshot. See `Store.save`."""
        save_local(self._holder, directory, extra, mode)

    def load(self, directory: Path, names: Sequence[str] | None = None) -> dict[str, object]:
        """Read a snapshot; tables of it that are declared later get their rows then. See `Store.load`."""
        source = Source(directory, names)
        self._put(source, [spec for name, spec in self._tables.specs.items() if name in source.names])
        self._source = source
        return source.snapshot.extra()

    def close(self) -> None:
        """Let go of the tables."""
        self._tables.tables.clear()

    def _read(self, wants: Sequence[Want]) -> Ready:
        return Ready([read_rows(named(self._tables.tables, want.table), want.keys) for want in wants])

    def _put(self, source: Source, specs: Sequence[TableSpec]) -> None:
        """Make tables with the rows of a snapshot; all are read before the first is put in place."""
        manifest, directory = source.snapshot.manifest, source.snapshot.directory
        for table in [source.table(spec, range(SHARDS)) for spec in specs]:
            self._tables.put(table)
            if manifest.mode == "full":
                self._holder.remember(manifest.save, directory.absolute(), [table.spec.name])


def check_same(known: TableSpec, asked: TableSpec) -> None:
    """Hold a specification against the one its table was made with.

    Raises:
        ConfigError: If they differ; names the first field and both values.
    """
    for field in dataclasses.fields(TableSpec):
        have, want = getattr(known, field.name), getattr(asked, field.name)
        if have != want:
            raise ConfigError(
                f"table {asked.name!r} was made with {field.name}={have!r} and is now asked with "
                f"{field.name}={want!r}. Give both the same settings, or another name."
            )
