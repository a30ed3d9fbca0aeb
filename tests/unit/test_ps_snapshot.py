"""Snapshots written and read in one process: round trips, deltas, exports, and files that are not what was written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import ConfigError, DataError
from phalanx.ps.server.service import Service
from phalanx.ps.server.snapshots.snapshot_service import SnapshotService
from phalanx.ps.snapshot.participant import SnapshotParticipant
from phalanx.ps.snapshot.read import SnapshotSource, open_snapshot
from phalanx.ps.snapshot.records import pack, read_records
from phalanx.ps.snapshot.save import save_local
from phalanx.ps.snapshot_lookup import Lookup
from phalanx.ps.stores.base import PullSpec
from phalanx.ps.stores.local import LocalStore
from phalanx.ps.stores.update import TableUpdate
from phalanx.ps.table.placement import SHARDS, shards_owned
from phalanx.ps.table.rules import Constant, CountFilter, EntryPolicy, Normal, ShowClick, TableSpec
from phalanx.ps.table.table import RowTable, make_table, read_rows
from phalanx.ps.table.update_rules import SGD, Adagrad
from ps_requests import FakeWorker

ADS = TableSpec(name="ads", dim=4, rule=Adagrad(lr=0.1), init=Normal(std=0.1), seed=3)
USERS = TableSpec(name="users", dim=3, rule=SGD(lr=0.1), entry=CountFilter(2))
SHOWS = TableSpec(name="shows", dim=2, rule=SGD(lr=0.1), entry=ShowClick())
ODD_IDS = np.array([0, -1, 2**63 - 1, -(2**63), 7, 123456789], np.int64)


def trained(*specs: TableSpec, ids: np.ndarray[Any, Any] = ODD_IDS) -> dict[str, RowTable]:
    tables = {}
    for spec in specs:
        table = tables[spec.name] = make_table(spec)
        push(table, ids, 1.0)
        push(table, ids[: len(ids) // 2], 0.5)
    return tables


def push(table: RowTable, ids: np.ndarray[Any, Any], value: float) -> None:
    gradients = np.outer(np.linspace(1, 2, len(ids)), np.full(table.spec.dim, value)).astype(np.float32)
    table.push(np.ascontiguousarray(ids), gradients)


def pulled(table: RowTable, ids: np.ndarray[Any, Any] = ODD_IDS) -> np.ndarray[Any, Any]:
    return read_rows(table, np.ascontiguousarray(ids))


def loaded(directory: Path, spec: TableSpec, servers: int = 1) -> list[RowTable]:
    return [SnapshotSource(directory).table(spec, shards_owned(server, servers)) for server in range(servers)]


def same(one: RowTable, two: RowTable) -> bool:
    for shard in range(SHARDS):
        a, b = one.export(shard), two.export(shard)
        for name in ("keys", "rows", "waiting_keys", "waiting_counts"):
            if not np.array_equal(getattr(a, name), getattr(b, name)):
                return False
    return True


@pytest.mark.parametrize("spec", [ADS, USERS, SHOWS], ids=lambda s: s.name)
def test_a_table_comes_back_with_its_state(tmp_path: Path, spec: TableSpec) -> None:
    tables = trained(spec)
    manifest = save_local(SnapshotParticipant(tables, range(SHARDS)), tmp_path, {"epoch": 3})
    (table,) = loaded(tmp_path, spec)
    assert same(tables[spec.name], table)
    assert manifest.rows == {spec.name: tables[spec.name].rows}
    # The next step is the step that would have come: state and counts are there.
    push(tables[spec.name], ODD_IDS, 1.0)
    push(table, ODD_IDS, 1.0)
    np.testing.assert_array_equal(pulled(tables[spec.name]), pulled(table))
    assert open_snapshot(tmp_path).extra() == {"epoch": 3}


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_any_number_of_servers_loads_a_snapshot(tmp_path: Path, servers: int) -> None:
    tables = trained(ADS, ids=np.arange(200))
    save_local(SnapshotParticipant(tables, range(SHARDS)), tmp_path, {})
    parts = loaded(tmp_path, ADS, servers)
    keys = [np.concatenate([part.keys(s) for s in range(SHARDS)]) for part in parts]
    assert sorted(np.concatenate(keys).tolist()) == list(range(200))
    assert all(len(k) for k in keys)


def test_several_tables_share_a_shard_file_and_load_by_name(tmp_path: Path) -> None:
    tables = trained(ADS, SHOWS)
    save_local(SnapshotParticipant(tables, range(SHARDS)), tmp_path, {})
    store = LocalStore()
    store.load(tmp_path, ["ads"])
    store.declare([ADS, SHOWS])
    assert {name: table.rows for name, table in store.report().items()} == {"ads": len(ODD_IDS), "shows": 0}
    with pytest.raises(ConfigError, match=r"table 'add' of .* holds \['ads', 'shows'\]. Did you mean 'ads'"):
        SnapshotSource(tmp_path, ["add"])


def test_a_delta_holds_what_changed_and_reads_on_its_base(tmp_path: Path) -> None:
    tables = trained(ADS, ids=np.arange(300))
    holder = SnapshotParticipant(tables, range(SHARDS))
    save_local(holder, tmp_path / "base", {"day": 1})
    push(tables["ads"], np.array([5, 1000, 1001]), 1.0)
    manifest = save_local(holder, tmp_path / "delta", {"day": 2}, "delta")
    assert manifest.rows == {"ads": 3}
    (table,) = loaded(tmp_path / "delta", ADS)
    assert same(table, tables["ads"])
    assert open_snapshot(tmp_path / "delta").extra() == {"day": 2}
    ids = np.array([5, 1000, 7, 55555])
    np.testing.assert_array_equal(Lookup(tmp_path / "delta").rows("ads", ids), pulled(tables["ads"], ids))


def test_threads_that_load_leave_the_table_that_one_thread_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = trained(ADS, ids=np.arange(3000))
    holder = SnapshotParticipant(tables, range(SHARDS))
    save_local(holder, tmp_path / "base", {})
    push(tables["ads"], np.array([5, 5000]), 1.0)
    save_local(holder, tmp_path / "delta", {}, "delta")
    for directory in (tmp_path / "base", tmp_path / "delta"):
        alone, together = (loaded_by(directory, cores, monkeypatch) for cores in (1, 8))
        assert same(alone, together)
        assert alone.tick == together.tick
        assert alone.tick == tables["ads"].tick - (directory.name == "base")


def loaded_by(directory: Path, cores: int, monkeypatch: pytest.MonkeyPatch) -> RowTable:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    (table,) = loaded(directory, ADS)
    return table


def test_a_delta_forgets_rows_that_went(tmp_path: Path) -> None:
    spec = TableSpec(name="shows", dim=2, rule=SGD(lr=0.1), entry=ShowClick(drop_below=0.15))
    tables = trained(spec, ids=np.arange(50))
    holder = SnapshotParticipant(tables, range(SHARDS))
    save_local(holder, tmp_path / "base", {})
    assert tables["shows"].shrink() == 25
    save_local(holder, tmp_path / "delta", {}, "delta")
    (table,) = loaded(tmp_path / "delta", spec)
    assert table.rows == 25
    assert same(table, tables["shows"])


@settings(max_examples=4)
@given(seed=st.integers(0, 2**32), entry=st.sampled_from([None, CountFilter(2), ShowClick(drop_below=0.3)]))
def test_a_delta_on_its_base_is_the_table_whatever_happened(
    tmp_path_factory: pytest.TempPathFactory, seed: int, entry: EntryPolicy | None
) -> None:
    directory = tmp_path_factory.mktemp("delta")
    spec = TableSpec(name="any", dim=2, rule=SGD(lr=0.1), entry=entry, max_bytes=32_000, evict="drop")
    tables = trained(spec, ids=np.arange(600))
    table, rng = tables["any"], np.random.default_rng(seed)
    holder = SnapshotParticipant(tables, range(SHARDS))
    save_local(holder, directory / "base", {})
    for _ in range(4):
        if rng.random() < 0.3:
            table.shrink()
        push(table, np.unique(rng.integers(0, 2000, 50)), 0.5)
        manifest = save_local(holder, directory / "delta", {}, "delta")
        assert manifest.rows["any"] <= 200
        (back,) = loaded(directory / "delta", spec)
        assert same(back, table)
        ids = np.arange(0, 2000, 7)
        np.testing.assert_array_equal(Lookup(directory / "delta").rows("any", ids), pulled(table, ids))


def test_deltas_of_schema_1_are_read(tmp_path: Path) -> None:
    tables = trained(SHOWS, ids=np.arange(300))
    holder = SnapshotParticipant(tables, range(SHARDS))
    save_local(holder, tmp_path / "base", {})
    push(tables["shows"], np.array([5, 1000]), 1.0)
    save_local(holder, tmp_path / "delta", {}, "delta")
    facts = json.loads((tmp_path / "delta" / "manifest.json").read_text())
    for file in facts["files"].values():
        path = tmp_path / "delta" / file["name"]
        (record,) = read_records(path)
        meta = {**record.meta, "format": "delta"}
        del meta["decays"]
        path.write_bytes(b"".join(map(bytes, pack(meta, record.arrays[:-1]))))
        file["bytes"] = path.stat().st_size
    (tmp_path / "delta" / "manifest.json").write_text(json.dumps({**facts, "schema": 1}))
    (table,) = loaded(tmp_path / "delta", SHOWS)
    assert same(table, tables["shows"])


def test_a_delta_of_a_table_that_came_later_is_whole(tmp_path: Path) -> None:
    tables = trained(ADS)
    holder = SnapshotParticipant(tables, range(SHARDS))
    save_local(holder, tmp_path / "base", {})
    tables.update(trained(SHOWS))
    save_local(holder, tmp_path / "delta", {}, "delta")
    for spec in (ADS, SHOWS):
        (table,) = loaded(tmp_path / "delta", spec)
        assert same(table, tables[spec.name])


def test_a_delta_needs_its_full_snapshot(tmp_path: Path) -> None:
    tables = trained(ADS)
    holder = SnapshotParticipant(tables, range(SHARDS))
    with pytest.raises(ConfigError, match=r"no full snapshot.*mode 'full' first"):
        save_local(holder, tmp_path / "delta", {}, "delta")
    save_local(holder, tmp_path / "base", {})
    with pytest.raises(ConfigError, match="folder of its own"):
        save_local(holder, tmp_path / "base", {}, "delta")
    save_local(holder, tmp_path / "delta", {}, "delta")
    save_local(holder, tmp_path / "base", {})
    with pytest.raises(DataError, match=r"changes since save .* now holds save .* Put the full snapshot back"):
        open_snapshot(tmp_path / "delta")


@pytest.mark.parametrize(
    ("mode", "within"), [("serving", 0.0), ("serving_bf16", 2**-8), ("serving_int8", 1 / 127), ("full", 0.0)]
)
def test_lookup_serves_what_training_pulls(tmp_path: Path, mode: str, within: float) -> None:
    tables = trained(ADS, USERS)
    save_local(SnapshotParticipant(tables, range(SHARDS)), tmp_path, {}, mode)
    lookup = Lookup(tmp_path)
    ids = np.concatenate([ODD_IDS, [99, 99, 7]])  # unknown, and repeated
    for name, table in tables.items():
        expected = pulled(table, ids)
        np.testing.assert_allclose(
            lookup.rows(name, ids), expected, rtol=0, atol=within * max(1e-9, np.abs(expected).max())
        )
    with pytest.raises(ConfigError, match="Asked for table 'x'"):
        lookup.rows("x", ids)


def test_training_can_begin_from_a_serving_export(tmp_path: Path) -> None:
    tables = trained(ADS)
    save_local(SnapshotParticipant(tables, range(SHARDS)), tmp_path, {}, "serving")
    (table,) = loaded(tmp_path, ADS)
    np.testing.assert_array_equal(pulled(table), pulled(tables["ads"]))


def test_another_rule_takes_the_values_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, phalanx_propagates: None
) -> None:
    tables = trained(ADS)
    save_local(SnapshotParticipant(tables, range(SHARDS)), tmp_path, {})
    (table,) = loaded(tmp_path, TableSpec(name="ads", dim=4, rule=SGD(lr=1.0), init=Constant()))
    np.testing.assert_array_equal(pulled(table), pulled(tables["ads"]))
    assert "optimizer state starts fresh" in caplog.text
    with pytest.raises(ConfigError, match=r"dim=5, but it was saved with dim=4"):
        loaded(tmp_path, TableSpec(name="ads", dim=5, rule=SGD(lr=1.0)))


def test_text_parts_are_the_table(tmp_path: Path) -> None:
    tables = trained(ADS, ids=np.arange(40))
    for server in range(2):
        save_local(SnapshotParticipant(tables, shards_owned(server, 2), server), tmp_path / str(server), {}, "text")
    lines = [line.split("\t") for n in range(2) for line in (tmp_path / str(n) / f"part-{n}").read_text().splitlines()]
    ids = np.array([int(line[1]) for line in lines])
    assert sorted(ids.tolist()) == list(range(40))
    assert {line[0] for line in lines} == {"ads"}
    values = np.array([line[2].split() for line in lines], np.float32)
    np.testing.assert_array_equal(values, pulled(tables["ads"], ids))
    with pytest.raises(ConfigError, match="text export, which is not read back"):
        open_snapshot(tmp_path / "0")


def test_text_does_not_overwrite_other_files(tmp_path: Path) -> None:
    (tmp_path / "part-0").write_text("training data")
    with pytest.raises(ConfigError, match=r"other files named part-\*"):
        save_local(SnapshotParticipant(trained(ADS), range(SHARDS)), tmp_path, {}, "text")
    assert (tmp_path / "part-0").read_text() == "training data"


def test_extra_holds_tensors_numbers_and_optimizer_state(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    extra = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7, "note": None}
    save_local(SnapshotParticipant({}, range(SHARDS)), tmp_path, extra)
    back = open_snapshot(tmp_path).extra()
    assert back["step"] == 7
    assert back["note"] is None
    torch.testing.assert_close(back["model"], dict(extra["model"]))
    optimizer.load_state_dict(back["optimizer"])
    with pytest.raises(ConfigError, match=r"Asked to save extra.a.1, which is a object"):
        save_local(SnapshotParticipant({}, range(SHARDS)), tmp_path, {"a": [1, object()]})


def test_a_save_replaces_the_one_before_and_leaves_nothing_of_it(tmp_path: Path) -> None:
    tables = trained(ADS)
    holder = SnapshotParticipant(tables, range(SHARDS))
    save_local(holder, tmp_path, {"t": torch.ones(1)})
    first = set(tmp_path.iterdir())
    manifest = save_local(holder, tmp_path, {"t": torch.zeros(1)})
    names = {path.name for path in tmp_path.iterdir()}
    assert manifest.dense is not None
    assert names == {"manifest.json", manifest.dense.name, *(file.name for file in manifest.files.values())}
    assert len(first) == len(names)


def test_a_save_that_failed_leaves_the_one_before(tmp_path: Path) -> None:
    tables = trained(ADS)
    holder = SnapshotParticipant(tables, range(SHARDS))
    save_local(holder, tmp_path, {"day": 1})
    before = sorted(tmp_path.iterdir())
    push(tables["ads"], np.array([77]), 1.0)
    with pytest.raises(ConfigError, match="Asked to save"):
        save_local(holder, tmp_path, {"day": object()})
    assert sorted(tmp_path.iterdir()) == before
    assert open_snapshot(tmp_path).extra() == {"day": 1}


# --- files that are not what was written -----------------------------------------------------------------------------


def one_shard(tmp_path: Path) -> Path:
    save_local(SnapshotParticipant(trained(ADS, ids=np.array([1])), range(SHARDS)), tmp_path, {})
    (path,) = tmp_path.glob("shard-*")
    return path


def load_all(tmp_path: Path) -> None:
    SnapshotSource(tmp_path).table(ADS, range(SHARDS))


def flip_bit(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


def test_a_cut_file_is_named_with_its_length(tmp_path: Path) -> None:
    path = one_shard(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[:-10])
    with pytest.raises(DataError, match=rf"{path} ends at byte {len(data) - 10}, it was written with {len(data)}"):
        load_all(tmp_path)
    path.unlink()
    with pytest.raises(DataError, match=rf"{path} is missing"):
        load_all(tmp_path)


@pytest.mark.parametrize("place", [0, 5, 20, 40, -1])
def test_a_flipped_bit_is_found(tmp_path: Path, place: int) -> None:
    path = one_shard(tmp_path)
    flip_bit(path, place)
    with pytest.raises(DataError, match=rf"{path} .*byte 0"):
        load_all(tmp_path)


def test_a_load_that_fails_changes_nothing_neither_here_nor_on_a_server(tmp_path: Path) -> None:
    path = one_shard(tmp_path)
    flip_bit(path, -1)
    service = Service()
    SnapshotService(service)
    worker, local = FakeWorker(service), LocalStore()
    worker.declare(USERS)
    local.declare([USERS, ADS])
    local.push([TableUpdate("ads", ODD_IDS, np.ones((len(ODD_IDS), 4), np.float32))])
    before = local.pull([PullSpec("ads", ODD_IDS)]).rows()[0]
    with pytest.raises(DataError, match=str(path)):
        local.load(tmp_path)
    np.testing.assert_array_equal(local.pull([PullSpec("ads", ODD_IDS)]).rows()[0], before)
    worker.declare(ADS)
    with pytest.raises(DataError, match=str(path)):
        worker.call("load", {"directory": str(tmp_path)})
    assert service.state.sources == []


def test_a_load_keeps_the_counts_of_all_tables(tmp_path: Path) -> None:
    save_local(SnapshotParticipant(trained(ADS, USERS), range(SHARDS)), tmp_path, {})
    store = LocalStore()
    store.declare([ADS, USERS])
    store.push(
        [TableUpdate(spec.name, ODD_IDS, np.ones((len(ODD_IDS), spec.dim), np.float32)) for spec in (ADS, USERS)]
    )
    store.load(tmp_path)
    assert [report.pushed for report in store.report().values()] == [len(ODD_IDS)] * 2
    assert [report.dropped for report in store.report().values()] == [0, len(ODD_IDS)]


def test_a_manifest_of_another_kind_is_refused(tmp_path: Path) -> None:
    one_shard(tmp_path)
    manifest = tmp_path / "manifest.json"
    value = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**value, "schema": 3}))
    with pytest.raises(DataError, match=r"schema 3.*this version reads schema 1 and 2"):
        open_snapshot(tmp_path)
    manifest.write_text(json.dumps({**value, "files": 3}))
    with pytest.raises(DataError, match="not the manifest of a snapshot"):
        open_snapshot(tmp_path)
    manifest.write_text("{")
    with pytest.raises(DataError, match=r"manifest.json is broken at byte 1"):
        open_snapshot(tmp_path)
    manifest.unlink()
    with pytest.raises(ConfigError, match=r"no snapshot in .*a save that ended"):
        open_snapshot(tmp_path)


def test_an_unknown_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mode 'fulll'; modes: full, delta, .* Did you mean 'full'"):
        save_local(SnapshotParticipant({}, range(SHARDS)), tmp_path, {}, "fulll")
