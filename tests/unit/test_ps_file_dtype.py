"""Tables whose rows are rounded as they move to files: how far, what snapshots hold, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from phalanx.errors import ConfigError
from phalanx.ps.embedding import SparseEmbedding
from phalanx.ps.pooling.embedding_bag import EmbeddingBag
from phalanx.ps.server.recovery import Recovery
from phalanx.ps.server.service import Service
from phalanx.ps.server.snapshots.snapshot_service import SnapshotService
from phalanx.ps.stores.base import PullSpec
from phalanx.ps.stores.local import LocalStore
from phalanx.ps.stores.update import TableUpdate
from phalanx.ps.table.placement import SHARDS
from phalanx.ps.table.rules import Constant, FileDtype, Normal, TableSpec, table_spec
from phalanx.ps.table.table import RowTable
from phalanx.ps.table.update_rules import SGD, Adagrad
from phalanx.versions import HAS_NATIVE
from ps_requests import FakeWorker
from ps_tables import in_file, native_table, pulled

pytestmark = pytest.mark.skipif(not HAS_NATIVE, reason="the native core is not installed")

IDS = np.arange(20_000)
LARGE = TableSpec("rows", 64, Adagrad(0.1), Normal(0.1))
SMALL = replace(LARGE, max_bytes=1 << 20)
"""Its memory holds 800 rows of 512 bytes, beside the index of `IDS`."""

NONE = replace(LARGE, max_bytes=1000)
"""The index fills its memory: each row is in a file once the call that changed it is through."""

ROUNDING: list[FileDtype] = ["bfloat16", "int8"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "rows"
    monkeypatch.setenv("PHALANX_SPILL_DIR", str(folder))
    return folder


def fill(table: RowTable, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for at in range(0, len(IDS), 1000):
        table.push(IDS[at : at + 1000], rng.normal(size=(1000, table.spec.dim)).astype(np.float32))


def rounding_step(values: np.ndarray, file_dtype: FileDtype) -> np.ndarray:
    """Return the most by which each value may differ once it has been in a file."""
    if file_dtype == "bfloat16":
        return np.abs(values) * 2.0**-8
    return np.abs(values).max(axis=1, keepdims=True) / 126 * 0.50001


@pytest.mark.parametrize("file_dtype", ROUNDING)
def test_rows_come_back_within_one_rounding(file_dtype: FileDtype) -> None:
    tables = [native_table(replace(SMALL, file_dtype=file_dtype)), native_table(LARGE)]
    for table in tables:
        fill(table, 0)
    small, large = tables
    assert small.stored > 15_000
    for _ in range(3):  # rows that come back, and leave again unchanged, are rounded no further
        back, exact = (pulled(table, IDS) for table in tables)
        assert (np.abs(back - exact) <= rounding_step(exact, file_dtype)).all()
        is_rounded = (back != exact).any(axis=1)
        assert 15_000 < is_rounded.sum() <= small.rows
        np.testing.assert_array_equal(back[is_rounded], in_file(exact, file_dtype)[is_rounded])
    for shard in range(0, SHARDS, 50):
        kept, expected = small.export(shard), large.export(shard)
        np.testing.assert_array_equal(kept.rows[:, :64], pulled(small, kept.keys))
        np.testing.assert_array_equal(kept.rows[:, 64:], expected.rows[:, 64:])  # state is exact


@pytest.mark.parametrize("file_dtype", ROUNDING)
def test_what_is_no_number_stays_none(file_dtype: FileDtype) -> None:
    table = native_table(replace(NONE, dim=4, file_dtype=file_dtype))
    rows = np.zeros((64, 4), np.float32)
    rows[:, 0] = np.tile([np.nan, np.inf, -np.inf, 0.0], 16)
    rows[:, 1:] = [1e-42, -0.5, 1.0]
    table.assign(np.arange(64), rows)
    table.assign(np.arange(64), rows)
    assert table.stored == 64
    back = pulled(table, np.arange(64))
    np.testing.assert_array_equal(back[:, 0], rows[:, 0])
    np.testing.assert_allclose(back[:, 1:], rows[:, 1:], atol=0.5 / 126)


def test_files_of_rounded_rows_are_smaller() -> None:
    """A record has 12 bytes more than a row: values in the file's type, an int8 scale, and a float32 state of 256."""
    taken = {}
    for file_dtype in ("float32", *ROUNDING):
        table = native_table(replace(SMALL, file_dtype=file_dtype))
        fill(table, 0)
        taken[file_dtype] = table.file_bytes / table.stored
    expected = {"float32": 256 + 256 + 12, "bfloat16": 128 + 256 + 12, "int8": 68 + 256 + 12}
    for name, least in expected.items():
        assert least <= taken[name] < 1.12 * least, taken


@pytest.mark.parametrize("file_dtype", ROUNDING)
def test_a_table_that_is_saved_is_the_one_that_is_pulled(file_dtype: FileDtype, tmp_path: Path) -> None:
    spec = replace(NONE, file_dtype=file_dtype)
    store = LocalStore()
    store.declare([spec])
    rng = np.random.default_rng(0)
    for _ in range(2):
        values = rng.normal(size=(2000, 64)).astype(np.float32)
        store.push([TableUpdate("rows", IDS[:2000], values)])
    (saved,) = store.pull([PullSpec("rows", IDS[:2000])]).rows()
    store.save(tmp_path / "saved", {})
    for other in (spec, LARGE, replace(NONE, file_dtype="int8")):
        again = LocalStore()
        again.load(tmp_path / "saved")
        again.declare([other])
        (rows,) = again.pull([PullSpec("rows", IDS[:2000])]).rows()
        np.testing.assert_array_equal(rows, in_file(saved, other.file_dtype))
    with pytest.raises(
        ConfigError, match="was made with file_dtype='int8' and is now asked with file_dtype='bfloat16'"
    ):
        again.declare([replace(NONE, file_dtype="bfloat16")])


@pytest.mark.parametrize("file_dtype", ROUNDING)
def test_a_server_that_starts_again_has_every_push_once_and_the_rows_it_had(
    file_dtype: FileDtype, tmp_path: Path
) -> None:
    def started() -> tuple[Recovery, FakeWorker]:
        service = Service()
        recovery = Recovery(service, SnapshotService(service), tmp_path / "state", log_bytes=1 << 20)
        recovery.recover("a job")
        return recovery, FakeWorker(service)

    recovery, worker = started()
    worker.declare(replace(NONE, file_dtype=file_dtype))
    rng = np.random.default_rng(0)
    for step in range(12):
        ids = np.unique(rng.integers(0, 2000, 600))
        values = rng.normal(size=(len(ids), 64)).astype(np.float32)
        worker.push(TableUpdate("rows", ids, values), step=step)
        if step == 6:
            recovery.write_base()
    before = worker.pull(*range(2000), step=12, table="rows").rows[0]
    recovery.close()
    _, again = started()
    again.declare(replace(NONE, file_dtype=file_dtype))
    np.testing.assert_array_equal(again.pull(*range(2000), step=12, table="rows").rows[0], before)
    report = again.call("report", {}).meta["tables"]["rows"]
    assert report["pushed"] > 12 * 500


def test_a_table_that_rounds_says_so(caplog: pytest.LogCaptureFixture, phalanx_propagates: None) -> None:
    store = LocalStore()
    store.declare([replace(NONE, name="exact")])
    assert "rounded" not in caplog.text
    store.declare([replace(NONE, file_dtype="int8")])
    assert "table rows: values of rows that leave memory are rounded to int8 (file_dtype)" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"file_dtype": "int4"}, "Input should be 'float32', 'bfloat16' or 'int8'"),
        ({"file_dtype": "int8"}, "no rows of this table move to files: give max_bytes=, without evict='drop'"),
        ({"file_dtype": "int8", "max_bytes": 1 << 20, "evict": "drop"}, "without evict='drop'"),
        ({"file_dtype": "int8", "max_bytes": 1 << 20, "dtype": "bfloat16"}, "leave out file_dtype, or dtype"),
    ],
)
def test_what_cannot_be_rounded_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        table_spec({**LARGE.to_json(), **settings})


@pytest.mark.parametrize("module", [SparseEmbedding, EmbeddingBag])
def test_modules_refuse_it_by_their_argument(module: Callable[..., torch.nn.Module]) -> None:
    with pytest.raises(ConfigError, match=r"file_dtype of rows must be torch.float32, .* or torch.int8, found 'int4'"):
        module(4, file_dtype="int4")
    with pytest.raises(ConfigError, match=r"\(file_dtype='int8'\): .*no rows of this table move to files"):
        module(4, file_dtype=torch.int8)
    made = module(4, file_dtype=torch.int8, max_bytes=1 << 20)
    assert made.settings.spec("t", SGD(0.1)).file_dtype == "int8"


def test_a_table_without_a_limit_has_no_file_dtype() -> None:
    spec = replace(SMALL, file_dtype="int8", init=Constant(1.0))
    assert spec.without_limit() == replace(LARGE, init=Constant(1.0))
