"""Tables whose rows leave memory for files: nothing is lost, memory keeps to its budget, full disks are errors."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from phalanx.errors import BackendError
from phalanx.ps.server.service import Service
from phalanx.ps.table.placement import SHARDS
from phalanx.ps.table.rules import TableSpec
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
