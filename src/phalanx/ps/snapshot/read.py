"""`Snapshot`: read tables from a snapshot, at any number of servers, deltas included."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.errors import ConfigError, DataError, did_you_mean
from phalanx.ps.snapshot.dense import read_extra
from phalanx.ps.snapshot.manifest import SnapshotManifest, read_manifest
from phalanx.ps.snapshot.records import Array, Record, TornRecordError, read_records
from phalanx.ps.snapshot.shard_threads import map_in_threads
from phalanx.ps.table.arrays import Columns
from phalanx.ps.table.placement import SHARDS
from phalanx.ps.table.reference import ReferenceTable
from phalanx.ps.table.row_layout import layout_of
from phalanx.ps.table.rules import ShowClick, TableSpec
from phalanx.ps.table.table import RowTable, make_table
from phalanx.ps.wire.progress import WorkProgress

_MOST_THREADS = 16
"""That load a table: the lanes that a native table has."""

_log = logging.getLogger("phalanx.ps")


class Snapshot:
    """A snapshot in a folder. See `open_snapshot`."""

    def __init__(self, directory: Path, manifest: SnapshotManifest, base: Snapshot | None) -> None:
        self.directory, self.manifest, self._base = directory, manifest, base

    @property
    def tables(self) -> dict[str, TableSpec]:
        """Specifications by name."""
        return self.manifest.tables

    def extra(self) -> dict[str, Any]:
        """Return what was saved beside the tables: JSON values and, where there were some, tensors."""
        return read_extra(self.directory, self.manifest)

    def check_names(self, names: Iterable[str]) -> None:
        """Check that the snapshot holds these tables.

        Raises:
            ConfigError: If it lacks one; names it.
        """
        for name in names:
            if name not in self.tables:
                raise ConfigError(
                    f"Asked for table '{name}' of {self.directory}, which holds {sorted(self.tables)}."
                    f"{did_you_mean(name, self.tables)}"
                )

    def columns(self, table: str, shard: int) -> Columns | None:
        """Return one table's part of a shard, None if it is empty. Of a serving snapshot: rows are values alone.

        Raises:
            DataError: If the file is broken; names file and offset.
        """
        changed = self._read_shard(table, shard)
        if self._base is None or self.manifest.base is None or table not in self.manifest.base.tables:
            return changed
        before = self._base.columns(table, shard)
        if changed is None or before is None or changed.is_complete:
            return before if changed is None else changed
        return _apply_delta(before, changed, self.tables[table])

    def _read_shard(self, table: str, shard: int) -> Columns | None:
        file = self.manifest.files.get(str(shard))
        if file is None:
            return None
        path = self.directory / file.name
        try:
            for record in read_records(path, lambda meta: meta.get("table") == table):
                return decode(record, path)
        except TornRecordError as e:
            raise DataError(f"{e} Take another copy of the snapshot.") from e
        return None

    def fill(self, table: RowTable, shards: Iterable[int], progress: WorkProgress | None = None) -> int:
        """Put a table's rows of these shards into an empty table, and return how many there were.

        As many threads as there are processors read, check and restore shards. Optimizer state comes along where the
        table's rule and statistics are those of the snapshot; otherwise values only, with a warning.

        Args:
            table: The table.
            shards: Numbers of the shards.
            progress: Gets the rows of each shard as they are put.

        Raises:
            ConfigError: If the snapshot lacks the table, or has another dim.
            DataError: If a file is broken; names file and offset.
        """
        self.check_names([table.spec.name])
        with_state = _has_state(self.manifest, table.spec)
        newest = self._delta_tick(table.spec.name) if with_state else 0

        def load(shard: int) -> int:
            columns = self.columns(table.spec.name, shard)
            if columns is None:
                return 0
            if with_state:
                # One tick for all shards: whichever comes first, the table then has that tick.
                table.restore(shard, replace(columns, tick=max(columns.tick, newest)))
            elif len(columns.keys):
                table.assign(columns.keys, np.ascontiguousarray(columns.rows[:, : table.spec.dim]))
            return len(columns.keys)

        # Each `assign` is a change of its own, whose number must not depend on threads.
        is_ordered = isinstance(table, ReferenceTable) or not with_state
        return map_shards(load, shards, progress or WorkProgress("loads"), is_ordered=is_ordered)

    def _delta_tick(self, table: str) -> int:
        """Return the tick of a table when a delta was written; 0 if this is none, or holds nothing of the table."""
        if self._base is None:
            return 0
        shards = map(int, self.manifest.files)
        return next((columns.tick for shard in shards if (columns := self._read_shard(table, shard))), 0)


def map_shards(load: Callable[[int], int], shards: Iterable[int], progress: WorkProgress, *, is_ordered: bool) -> int:
    """Call `load` for each shard, in as many threads as there are processors, and return the sum of its results.

    Args:
        load: Reads one shard; returns its rows.
        shards: Numbers of shards.
        progress: Is told of the rows of each shard.
        is_ordered: Whether one thread does it, shard by shard.
    """
    shards = list(shards)
    threads = 1 if is_ordered else min(len(shards), len(os.sched_getaffinity(0)), _MOST_THREADS)
    if threads <= 1:
        return _sum_rows(map(load, shards), progress)
    return _sum_rows(map_in_threads(load, shards, threads=threads, name="load"), progress)


def _sum_rows(of_shards: Iterable[int], progress: WorkProgress) -> int:
    total = 0
    for rows in of_shards:
        total += rows
        progress.add(rows)
    return total


def open_snapshot(directory: Path | str) -> Snapshot:
    """Open a snapshot, with its base if it is a delta.

    Raises:
        ConfigError: If the folder holds none.
        DataError: If it is broken or incomplete; names the file.
    """
    directory = Path(directory)
    manifest = read_manifest(directory)
    if manifest.mode == "text":
        raise ConfigError(f"{directory} holds a text export, which is not read back. Load a snapshot of another mode.")
    if manifest.base is None:
        return Snapshot(directory, manifest, None)
    base = Snapshot(directory / manifest.base.directory, read_manifest(directory / manifest.base.directory), None)
    if base.manifest.mode != "full":
        raise DataError(
            f"{directory} holds the changes since {base.directory}, which is of mode {base.manifest.mode!r} and not "
            "full. Put the full snapshot back that it was made on."
        )
    if base.manifest.save != manifest.base.save:
        raise DataError(
            f"{directory} holds the changes since save {manifest.base.save}, but {base.directory} now holds save "
            f"{base.manifest.save}. Put the full snapshot back that it was made on."
        )
    return Snapshot(directory, manifest, base)


def decode(record: Record, path: Path) -> Columns:
    """Return a table's part of a shard from its record.

    Raises:
        DataError: If the record holds something else.
    """
    meta, arrays = record.meta, record.arrays
    try:
        layout, tick = _LAYOUTS[meta["format"]], meta["tick"]
        actual = tuple((array.dtype.name, array.ndim) for array in arrays)
        if actual != layout or type(tick) is not int or not 0 <= tick < 1 << 63:
            raise ValueError(f"arrays {actual} at tick {str(tick)[:20]}")
        if layout[: len(_ALL)] == _ALL:
            keys, ticks, rows, waiting_keys, waiting_ticks, waiting_counts, days, *rest = arrays
            removed, decays = rest[0] if rest else np.empty(0, np.int64), meta.get("decays", 0)
            if type(decays) is not int or not 0 <= decays <= len(days):
                raise ValueError(f"{str(decays)[:20]} decays in {len(days)} days")
            waiting = waiting_keys, waiting_ticks, waiting_counts
            return Columns(keys, ticks, rows, *waiting, days, removed, decays, tick, meta["whole"] is True)
        values = _VALUES[meta["format"]](*arrays[1:])
        if len(values) != len(arrays[0]):
            raise ValueError(f"{len(values)} rows for {len(arrays[0])} keys")
    except (KeyError, TypeError, ValueError) as e:
        raise DataError(f"{path} is broken at byte {record.offset}: not a part of a table ({e!r}).") from e
    return values_only(arrays[0], values, tick)


_KEYS, _TICKS, _ROWS = ("int64", 1), ("uint64", 1), ("float32", 2)
_ALL = (_KEYS, _TICKS, _ROWS, _KEYS, _TICKS, ("uint32", 1), _TICKS)
_LAYOUTS: dict[str, tuple[tuple[str, int], ...]] = {
    "full": _ALL,
    "changes": (*_ALL, _KEYS),
    "delta": _ALL,  # of schema 1: without removed ids
    "serving": (_KEYS, _ROWS),
    "serving_bf16": (_KEYS, ("uint16", 2)),
    "serving_int8": (_KEYS, ("int8", 2), ("float32", 1)),
}
"""Type and dimensions of each array of a record, by format; what native code reads depends on them."""

_VALUES: dict[str, Callable[..., Array]] = {
    "serving": lambda values: values,
    "serving_bf16": lambda bits: (bits.astype(np.uint32) << np.uint32(16)).view(np.float32),
    "serving_int8": lambda steps, scales: steps * scales[:, None],
}


def values_only(keys: Array, values: Array, tick: int) -> Columns:
    """Return the columns of a table that was never trained: ids and values alone."""
    no_keys, no_ticks = np.empty(0, np.int64), np.empty(0, np.uint64)
    ticks = np.zeros(len(keys), np.uint64)
    waiting = no_keys, no_ticks, np.empty(0, np.uint32)
    return Columns(keys, ticks, values, *waiting, no_ticks, no_keys, 0, tick, is_complete=True)


def _apply_delta(before: Columns, changed: Columns, spec: TableSpec) -> Columns:
    """Return a shard with the changes since its base put over it."""
    replaced = np.concatenate([changed.keys, changed.waiting_keys, changed.removed])
    rows, waiting = ~np.isin(before.keys, replaced), ~np.isin(before.waiting_keys, replaced)

    def merge_column(name: str, is_kept: Array) -> Array:
        return np.concatenate([getattr(before, name)[is_kept], getattr(changed, name)])

    if isinstance(spec.entry, ShowClick):
        for _ in range(changed.decays):
            before.rows[:, -2:] *= np.float32(spec.entry.decay)
    return replace(
        changed,
        removed=np.empty(0, np.int64),
        decays=0,
        keys=merge_column("keys", rows),
        ticks=merge_column("ticks", rows),
        rows=merge_column("rows", rows),
        waiting_keys=merge_column("waiting_keys", waiting),
        waiting_ticks=merge_column("waiting_ticks", waiting),
        waiting_counts=merge_column("waiting_counts", waiting),
        is_complete=True,
    )


def _has_state(manifest: SnapshotManifest, spec: TableSpec) -> bool:
    """Whether a snapshot's rows are whole rows of a table with this specification.

    Raises:
        ConfigError: If even its values are not.
    """
    saved = manifest.tables[spec.name]
    if saved.dim != spec.dim:
        raise ConfigError(
            f"Asked to load table '{spec.name}' with dim={spec.dim}, but it was saved with dim={saved.dim}. Give the "
            "table another name, or the dim it was saved with."
        )
    if manifest.mode not in ("full", "delta"):
        return False
    old, new = layout_of(saved), layout_of(spec)
    same = type(saved.rule) is type(spec.rule) and (old.width, old.state) == (new.width, new.state)
    if not same:
        _log.warning(
            "table %s was saved with %s and is now trained with %s: values are loaded, optimizer state starts fresh",
            spec.name,
            saved.rule,
            spec.rule,
        )
    return same


class SnapshotSource:
    """A snapshot that fills tables as they are declared.

    Args:
        directory: Its folder.
        names: Tables to take from it; all it has when None.

    Raises:
        ConfigError: If the folder holds no snapshot, or lacks one of the names.
        DataError: If it is broken.
    """

    def __init__(self, directory: Path | str, names: Sequence[str] | None = None) -> None:
        self.snapshot = open_snapshot(directory)
        self.names = set(self.snapshot.tables if names is None else names)
        self.snapshot.check_names(self.names)

    def table(self, spec: TableSpec, shards: Sequence[int], progress: WorkProgress | None = None) -> RowTable:
        """Return a new table with these shards' rows; see `Snapshot.fill`."""
        table = make_table(spec)
        if progress is not None:
            in_all = self.snapshot.manifest.rows.get(spec.name, 0)
            progress.expect(in_all * len(shards) // SHARDS, f"rows of table {spec.name}")
        rows = self.snapshot.fill(table, shards, progress)
        _log.info("table %s: %d rows loaded from %s", spec.name, rows, self.snapshot.directory)
        return table
