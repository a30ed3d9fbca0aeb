"""The native engine: what many clients push at once is in the log in the order in which the tables took it."""

from __future__ import annotations

import importlib
import json
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.errors import ConfigError
from phalanx.ps.server.log import LogEntry, replay
from phalanx.ps.server.recovery import Recovery
from phalanx.ps.server.service import Service
from phalanx.ps.server.snapshots.snapshot_service import SnapshotService
from phalanx.ps.stores.update import TableUpdate
from phalanx.ps.table.arrays import Columns
from phalanx.ps.table.placement import SHARDS
from phalanx.ps.table.rules import Constant, CountFilter, ShowClick, TableSpec
from phalanx.ps.table.update_rules import FTRL, SGD, Adagrad
from ps_requests import APPLIED, FakeWorker, gradient

WORKERS = 4
SPECS = [
    TableSpec(name="halves", dim=3, rule=Adagrad(lr=0.1), dtype="bfloat16"),
    TableSpec(name="counted", dim=2, rule=SGD(lr=0.1), entry=CountFilter(2)),
    TableSpec(name="small", dim=4, rule=Adagrad(lr=0.1), max_bytes=20_000, evict="drop"),
]


def recovered(directory: Path) -> Service:
    service = Service()
    Recovery(service, SnapshotService(service), directory).recover("a job")
    return service


def content(service: Service) -> dict[str, list[list[Any]]]:
    """Return every column of every table, shard by shard."""

    def lists(columns: Columns) -> list[Any]:
        fields = [getattr(columns, field) for field in Columns.__slots__]
        return [f.tobytes() if isinstance(f, np.ndarray) else f for f in fields]

    tables = service.state.tables.tables
    return {name: [lists(table.export(shard)) for shard in range(SHARDS)] for name, table in tables.items()}


def push_random(worker: FakeWorker, steps: int) -> None:
    draw = np.random.default_rng(worker.worker)
    for step in range(steps):
        updates = []
        for spec in SPECS:
            ids = draw.choice(400, size=int(draw.integers(0, 300)), replace=False).astype(np.int64)
            values = draw.normal(size=(len(ids), spec.dim)).astype(np.float32)
            kind = str(draw.choice(["gradient", "gradient", "delta", "assign"]))
            updates.append(TableUpdate(spec.name, ids, values, kind=kind, lr=None if step % 2 else 0.05))
        worker.push(*updates, step=step)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_tables_that_clients_changed_at_once_come_back_from_the_log_bit_for_bit(tmp_path: Path, mode: str) -> None:
    service = recovered(tmp_path)
    workers = [FakeWorker(service, worker) for worker in range(WORKERS)]
    for worker in workers:
        worker.declare(*SPECS, mode=mode, workers=WORKERS)
    threads = [threading.Thread(target=push_random, args=(worker, 12)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert service.state.require_clocks().steps == [12] * WORKERS
    again = recovered(tmp_path)
    assert content(again) == content(service)
    assert again.state.clients.to_json() == service.state.clients.to_json()
    assert again.state.require_clocks().to_json() == service.state.require_clocks().to_json()


def test_the_log_says_of_a_push_what_was_sent(tmp_path: Path) -> None:
    service = recovered(tmp_path)
    worker = FakeWorker(service, client=2**64 - 1)
    name = 'items "ä" \\ \n'
    worker.declare(TableSpec(name=name, dim=2, rule=SGD(lr=1.0), entry=ShowClick()))
    sent = [
        gradient((7, -7), 0.1, table=name, lr=1e-30, shows=np.float32([1, 2]), counts=np.uint32([3, 4])),
        gradient((), 0, table=name, clicks=np.float32([])),
        gradient((2**62,), 5, table=name, kind="assign"),
    ]
    worker.push(*sent, weight=0.1)
    (_, record) = replay(tmp_path, 0)
    entry = LogEntry.of(record)
    assert (entry.op, entry.client, entry.seq) == ("push", 2**64 - 1, worker.seq)
    assert entry.meta == {"step": 0, "weight": 0.1}
    for found, given in zip(entry.updates, sent, strict=True):
        assert (found.table, found.kind, found.lr) == (given.table, given.kind, given.lr)
        for one, other in zip(found.arrays(), given.arrays(), strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)
    assert content(recovered(tmp_path)) == content(service)


def test_a_worker_without_rows_in_a_step_leaves_shows_and_clicks_of_the_others(tmp_path: Path) -> None:
    service = recovered(tmp_path)
    spec = TableSpec(name="items", dim=2, rule=SGD(lr=1.0), init=Constant(0.0), entry=ShowClick())
    one, two = (FakeWorker(service, worker) for worker in range(2))
    for worker in (one, two):
        worker.declare(spec, mode="sync", workers=2)
    columns = {"shows": np.float32([5]), "clicks": np.float32([2])}
    none = {"shows": np.float32([]), "clicks": np.float32([])}
    one.push(gradient((1,), 2.0, **columns), step=0)
    two.push(gradient((), 0.0, **none), step=0)
    (rows,) = (row for shard in range(SHARDS) if len(row := service.state.tables.tables["items"].export(shard).rows))
    assert rows.tolist() == [[-1.0, -1.0, 5.0, 2.0]]


def test_what_a_pull_cannot_name_and_a_rule_cannot_take_is_said() -> None:
    worker = FakeWorker(Service())
    worker.declare(TableSpec(name="items", dim=2, rule=FTRL(lr=0.1), init=Constant(0.0)))
    pulled = worker.pull(1, 2, keep=True).number
    with pytest.raises(ConfigError, match=r"rows of type float32 and shape \(3, 2\) for 2 keys.*shape \(2, 2\)"):
        worker.push_pulled(pulled, 1.0, 3)
    with pytest.raises(ConfigError, match="learn at rate 0, by which FTRL divides"):
        worker.push(gradient((1,), 1.0, lr=0.0))
    with pytest.raises(ConfigError, match=r"learn at rate -0.5. Give a number"):
        worker.push(gradient((1,), 1.0, lr=-0.5))
    assert worker.push_pulled(pulled, 1.0, 2) == APPLIED


def test_a_server_without_the_native_core_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.versions.HAS_NATIVE", False)
    monkeypatch.delitem(sys.modules, "phalanx.ps.server")
    with pytest.raises(ConfigError, match=r"A parameter server needs the native core.*Install phalanx"):
        importlib.import_module("phalanx.ps.server")


def test_a_reply_of_control_is_given_again_after_a_restart(tmp_path: Path) -> None:
    worker = FakeWorker(recovered(tmp_path))
    worker.declare()
    leased = worker.call("lease", {"epoch": 0, "files": ["a", "b"]}).meta
    worker.service = recovered(tmp_path)
    assert worker.call("lease", {"epoch": 0, "files": ["a", "b"]}, seq=worker.seq).meta == json.loads(
        json.dumps(leased)
    )
