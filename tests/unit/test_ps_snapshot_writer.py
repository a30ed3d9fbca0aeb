"""Snapshots that a server writes in threads while it continues."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.errors import BackendError, InternalError
from phalanx.ps.server.snapshots.snapshot_writer import SnapshotWriter
from phalanx.ps.snapshot import write
from phalanx.ps.snapshot.records import read_records
from phalanx.ps.snapshot.shard_threads import map_in_threads
from phalanx.ps.snapshot.write import WriteRequest
from phalanx.ps.table.arrays import Columns
from phalanx.ps.table.placement import SHARDS
from phalanx.ps.table.rules import TableSpec
from phalanx.ps.table.table import RowTable, make_table
from phalanx.ps.table.update_rules import Adagrad

SPEC = TableSpec(name="ads", dim=4, rule=Adagrad(lr=0.1))
IDS = np.arange(5000, dtype=np.int64)


def pushed(table: RowTable, times: int) -> RowTable:
    for _ in range(times):
        table.push(IDS, np.ones((len(IDS), SPEC.dim), np.float32))
    return table


def writer_of(directory: Path, tables: Mapping[str, Any], *, mode: str = "full") -> SnapshotWriter:
    return SnapshotWriter(WriteRequest(directory, "0123abcd", mode, range(SHARDS)), tables)  # type: ignore[arg-type]


class HeldTable:
    """A table whose moment is read only when `may_read` is set, and then fails if `error` is."""

    def __init__(self, error: Exception | None = None) -> None:
        self.spec, self.table, self.error = SPEC, make_table(SPEC), error
        self.may_read, self.has_ended = threading.Event(), False

    def moment(self, since: int = 0) -> HeldTable:
        return self

    def export(self, shard: int) -> Columns:
        self.may_read.wait()
        if self.error is not None:
            raise self.error
        return self.table.export(shard)

    def end(self) -> None:
        self.has_ended = True


@pytest.mark.parametrize("mode", ["full", "serving", "text"])
def test_files_hold_the_moment_at_which_they_were_begun(tmp_path: Path, mode: str) -> None:
    table = pushed(make_table(SPEC), 2)
    begun, settled = tmp_path / "begun", tmp_path / "settled"
    begun.mkdir(), settled.mkdir()
    writer_of(settled, {"ads": table}, mode=mode).result()
    writer = writer_of(begun, {"ads": table}, mode=mode)
    pushed(table, 3)
    assert writer.result()["rows"] == {"ads": len(IDS)}
    assert {p.name: p.read_bytes() for p in begun.iterdir()} == {p.name: p.read_bytes() for p in settled.iterdir()}


def test_a_save_that_ends_leaves_no_memory_behind(tmp_path: Path) -> None:
    table = pushed(make_table(SPEC), 3)
    before = table.bytes
    writer = writer_of(tmp_path, {"ads": table})
    pushed(table, 1)
    writer.result()
    assert table.bytes == before


def test_a_disk_that_takes_no_file_is_the_savers_error_and_ends_the_moment(tmp_path: Path) -> None:
    (tmp_path / "shard-0007-0123abcd.bin").mkdir()
    table = HeldTable()
    table.table = pushed(make_table(SPEC), 1)
    table.may_read.set()
    with pytest.raises(BackendError, match=r"A snapshot was to be written to .* bytes free: .* save again"):
        writer_of(tmp_path, {"ads": table}).result()
    assert table.has_ended


def test_a_save_that_is_given_up_ends_and_says_so(tmp_path: Path) -> None:
    table = HeldTable()
    writer = writer_of(tmp_path, {"ads": table})
    assert not writer.wait(0)
    writer.stop()
    table.may_read.set()
    with pytest.raises(BackendError, match=r"its server ended before it was whole.*save again"):
        writer.result()
    assert table.has_ended


def test_an_error_of_ours_is_reported_as_one(tmp_path: Path) -> None:
    table = HeldTable(ValueError("odd"))
    table.may_read.set()
    with pytest.raises(InternalError, match=r"not written: ValueError\('odd'\)\. Please report it"):
        writer_of(tmp_path, {"ads": table}).result()
    assert table.has_ended


def test_a_shard_that_holds_nothing_has_no_file(tmp_path: Path) -> None:
    table = make_table(SPEC)
    table.push(IDS[:3], np.ones((3, SPEC.dim), np.float32))
    files = writer_of(tmp_path, {"ads": table}).result()["files"]
    assert 1 <= len(files) <= 3
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(name for name, _, _ in files.values())
    assert sum(len(r.arrays[0]) for p in tmp_path.iterdir() for r in read_records(p)) == 3


@pytest.mark.parametrize(("shards", "threads"), [(range(SHARDS), 2), (range(5), 4), (range(0), 1), ([7, 3, 9], 1)])
def test_shards_are_taken_in_parts_and_given_in_order(shards: Sequence[int], threads: int) -> None:
    assert list(map_in_threads(lambda shard: shard * 2, shards, threads=threads, name="test")) == [
        s * 2 for s in shards
    ]


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (3, 2), (64, 4)])
def test_a_save_leaves_a_core_to_those_who_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, threads: int
) -> None:
    asked: list[int] = []

    def mapped(call: Any, shards: Sequence[int], *, threads: int, **options: Any) -> Any:
        asked.append(threads)
        return map_in_threads(call, shards, threads=threads, **options)

    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr(write, "map_in_threads", mapped)

    assert writer_of(tmp_path, {"ads": pushed(make_table(SPEC), 1)}).result()["rows"] == {"ads": len(IDS)}
    assert asked == [threads]


def test_threads_that_write_go_behind_those_that_train(tmp_path: Path) -> None:
    nice: set[int] = set()

    class Table(HeldTable):
        def export(self, shard: int) -> Columns:
            nice.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            return super().export(shard)

    before = os.getpriority(os.PRIO_PROCESS, 0)
    table = Table()
    table.may_read.set()
    writer_of(tmp_path, {"ads": table}).result()

    assert min(nice) > before or before == 19
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_what_a_shard_raises_ends_those_that_have_not_begun() -> None:
    begun = []

    def call(shard: int) -> None:
        begun.append(shard)
        if shard == 3:
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        list(map_in_threads(call, range(SHARDS), threads=1, name="test"))
    assert begun[:4] == [0, 1, 2, 3]
    assert 4 not in begun
