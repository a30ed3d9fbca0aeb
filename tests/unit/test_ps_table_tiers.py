"""Tables whose rows leave memory for files: nothing is lost, memory keeps to its budget, bad disks are errors."""

from __future__ import annotations

import fcntl
import os
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from phalanx.errors import BackendError, ClosedError, ConfigError, DataError
from phalanx.ps.server.recovery import Recovery
from phalanx.ps.server.service import Service
from phalanx.ps.server.snapshots.snapshot_service import SnapshotService
from phalanx.ps.stores.local import LocalStore
from phalanx.ps.stores.update import TableUpdate
from phalanx.ps.table.placement import SHARDS, shard_of, table_salt
from phalanx.ps.table.rules import FileDtype, ShowClick, TableSpec
from phalanx.ps.table.table import RowTable
from phalanx.ps.table.update_rules import Adagrad
from phalanx.versions import HAS_NATIVE
from ps_requests import SPEC, FakeWorker, gradient
from ps_tables import native_table, pulled

pytestmark = pytest.mark.skipif(not HAS_NATIVE, reason="the native core is not installed")

LARGE = TableSpec("large", 64, Adagrad(0.1))
SMALL = replace(LARGE, max_bytes=4 << 20)
"""Its memory holds 7,700 rows of 512 bytes."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "rows"
    monkeypatch.setenv("PHALANX_SPILL_DIR", str(folder))
    return folder


@pytest.fixture
def small_files() -> Iterator[None]:
    """The system takes files of 300,000 bytes at most."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def ones(name: str, count: int) -> TableUpdate:
    return TableUpdate(name, np.arange(count), np.ones((count, 64), np.float32))


def damage(folder: Path) -> None:
    """Zero the files of rows in a folder."""
    for link in [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]:
        if os.path.exists(link) and os.readlink(link).startswith(f"{folder}/"):
            file = int(link.rpartition("/")[2])
            if fcntl.fcntl(file, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_DIRECT) != os.O_RDWR:
                continue  # the same file, past the system's cache
            os.pwrite(file, bytes(os.fstat(file).st_size), 0)


def push(table: RowTable, keys: np.ndarray, value: float) -> None:
    table.push(keys, np.full((len(keys), table.spec.dim), value, np.float32))


def fill(table: RowTable, first: int, end: int) -> None:
    for at in range(first, end, 1000):
        push(table, np.arange(at, at + 1000), 0.5)


def test_a_table_of_ten_times_its_memory_trains_as_one_without_a_limit(folder: Path) -> None:
    tables = [native_table(SMALL), native_table(LARGE)]
    rng = np.random.default_rng(0)
    for table in tables:
        fill(table, 0, 80_000)
    for _ in range(40):
        keys = np.unique(rng.zipf(1.2, 2000) % 80_000)
        np.testing.assert_array_equal(*(pulled(table, keys) for table in tables))
        for table in tables:
            push(table, keys, 0.25)
    small, large = tables
    assert small.rows == large.rows == 80_000
    assert small.rows * 512 > 9 * (4 << 20)
    assert (small.rows - small.stored) * 512 + small.rows * 32 <= 4 << 20
    assert small.bytes < 3 * (4 << 20)
    assert small.file_bytes < 2 * small.stored * 524 + (4 << 20)
    assert (small.evicted, large.stored, large.file_reads) == (0, 0, 0)
    for shard in range(0, SHARDS, 50):
        np.testing.assert_array_equal(small.export(shard).rows, large.export(shard).rows)
    assert list(folder.iterdir()) == []


def test_rows_that_are_used_are_not_read_from_files() -> None:
    table = native_table(SMALL)
    fill(table, 0, 40_000)
    hot = np.arange(1000)
    for _ in range(20):
        pulled(table, hot)
        push(table, hot, 0.5)
    before = table.file_reads
    for at in range(10_000, 30_000, 1000):
        pulled(table, np.arange(at, at + 1000))  # an evaluation reads each row once
        pulled(table, hot)
    assert table.file_reads - before == 20_000


def test_a_full_disk_refuses_pushes_and_loses_nothing(folder: Path, small_files: None) -> None:
    spec = replace(LARGE, max_bytes=64 << 10)
    table, twin = native_table(spec), native_table(LARGE)
    filled = 0
    with pytest.raises(
        BackendError, match=rf"max_bytes\), and the file of lane \d+ in {folder} takes no more rows: File"
    ):
        for at in range(0, 100_000, 1000):
            fill(table, at, at + 1000)
            fill(twin, at, at + 1000)
            filled = at + 1000
    assert 5000 < filled < 20_000
    assert (table.rows, table.tick) == (filled, twin.tick)
    np.testing.assert_array_equal(pulled(table, np.arange(filled)), pulled(twin, np.arange(filled)))
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    for each in (table, twin):
        fill(each, 0, filled + 1000)
    assert (table.rows - table.stored) * 512 <= 64 << 10
    np.testing.assert_array_equal(pulled(table, np.arange(filled)), pulled(twin, np.arange(filled)))


def test_lanes_give_up_their_memory_for_one_whose_file_takes_no_more(folder: Path, small_files: None) -> None:
    table, twin = native_table(replace(LARGE, max_bytes=1 << 20)), native_table(LARGE)
    keys = np.arange(40_000)
    is_first = shard_of(keys, table_salt(LARGE.name)) % 16 == 0
    others, of_first_lane = keys[~is_first][:4000], keys[is_first][:1200]
    for part in (*np.array_split(others, 40), *np.array_split(of_first_lane, 40)):
        for each in (table, twin):
            push(each, part, 0.5)
        assert table.rows - table.stored <= (1 << 20) // 512
    # The file takes 300,000 bytes, 570 rows: 630 rows of the lane stay in memory, ten times its share.
    np.testing.assert_array_equal(pulled(table, of_first_lane), pulled(twin, of_first_lane))
    np.testing.assert_array_equal(pulled(table, others), pulled(twin, others))


def test_a_folder_that_cannot_be_written_is_named(folder: Path) -> None:
    table = native_table(replace(LARGE, max_bytes=1000))
    folder.rmdir()
    fill(table, 0, 1000)
    with pytest.raises(BackendError, match=rf"in {folder} cannot be made: No such file or directory. No row is lost"):
        fill(table, 0, 1000)
    assert table.stored == 0
    folder.mkdir()
    fill(table, 0, 1000)
    assert table.stored > 900


def test_a_server_refuses_what_its_disk_does_not_take_before_it_changes_anything(folder: Path) -> None:
    service = Service()
    service.engine.set_budget(1 << 30)
    worker = FakeWorker(service)
    worker.declare(replace(SPEC, max_bytes=200))
    (table,) = service.state.tables.tables.values()
    folder.rmdir()
    worker.push(gradient(tuple(range(100)), 1.0))
    with pytest.raises(BackendError, match=r"Table 'items': A push would bring rows into memory, .* cannot be made"):
        worker.push(gradient((1, 2), 1.0), step=1)
    assert (table.rows, table.tick) == (100, 1)
    folder.mkdir()
    worker.push(gradient((1, 2), 1.0), step=1)
    assert table.tick == 2


def test_a_full_disk_refuses_days_that_write_all_rows_anew(folder: Path, small_files: None) -> None:
    table = native_table(replace(LARGE, max_bytes=64 << 10, entry=ShowClick()))
    with pytest.raises(BackendError, match="max_bytes"):
        fill(table, 0, 100_000)
    before = (table.rows, table.stored, table.tick)
    with pytest.raises(BackendError, match=rf"The end of a day .*, and the file of lane \d+ in {folder} takes no more"):
        table.shrink()
    assert (table.rows, table.stored, table.tick) == before


def test_a_server_refuses_a_day_that_its_disk_does_not_take_and_goes_on(small_files: None) -> None:
    service = Service()
    worker = FakeWorker(service)
    worker.declare(replace(LARGE, max_bytes=64 << 10, entry=ShowClick()))
    worker.push(ones("large", 20_000))
    with pytest.raises(BackendError, match=r"The end of a day would .* takes no more rows: .*, and try again"):
        worker.call("shrink", {"table": "large"})
    assert not service.stopped.is_set()
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert worker.call("shrink", {"table": "large"}).meta == {"rows": 20_000}


def test_a_push_to_several_tables_changes_none_of_them_when_one_has_no_room(folder: Path) -> None:
    store = LocalStore()
    store.declare([replace(LARGE, name="first"), replace(LARGE, name="second", max_bytes=1000)])
    folder.rmdir()
    store.push([ones("first", 100), ones("second", 100)])
    with pytest.raises(BackendError, match="cannot be made"):
        store.push([ones("first", 100), ones("second", 100)])
    assert {name: report.pushed for name, report in store.report().items()} == {"first": 100, "second": 100}


@pytest.mark.parametrize("file_dtype", ["float32", "bfloat16", "int8"])
def test_a_server_ends_when_a_row_that_is_pulled_is_broken(folder: Path, file_dtype: FileDtype) -> None:
    service = Service()
    worker = FakeWorker(service)
    worker.declare(replace(LARGE, max_bytes=1000, file_dtype=file_dtype))
    worker.push(ones("large", 1000))
    damage(folder)
    with pytest.raises(DataError, match=rf"lane \d+ in {folder}, but its record \d+ has checksum"):
        worker.pull(*range(1000), step=1, table="large")
    assert service.stopped.is_set()
    assert isinstance(service.failure, DataError)
    with pytest.raises(ClosedError, match="stopping"):
        worker.push(ones("large", 10), step=1)


def test_a_server_ends_when_a_row_of_its_base_is_broken_and_writes_no_other_base(folder: Path, tmp_path: Path) -> None:
    service = Service()
    recovery = Recovery(service, SnapshotService(service), tmp_path / "state", log_bytes=1)
    recovery.recover("a job")
    worker = FakeWorker(service)
    worker.declare(replace(LARGE, max_bytes=1000))
    for step in range(6):
        worker.push(ones("large", 1000), step=step)
    damage(folder)
    while not service.stopped.wait(0.01):
        recovery.tick()
    assert isinstance(service.failure, DataError)
    with pytest.raises(ClosedError, match="stopping"):
        recovery.write_base()
    recovery.close()
    assert [path.suffix for path in (tmp_path / "state").glob("base-*")] == [".part"]


def test_a_folder_that_cannot_be_made_names_its_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PHALANX_SPILL_DIR", str(tmp_path / "file" / "rows"))
    with pytest.raises(ConfigError, match=r"file/rows, which cannot be made: Not a directory. Set PHALANX_SPILL_DIR"):
        native_table(SMALL)
