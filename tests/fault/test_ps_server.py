"""Servers that are killed, and disks that are full: nothing acknowledged is lost, and nothing is done twice."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launching import wait_until
from phalanx.errors import BackendError, PeerLostError, PhalanxError
from phalanx.ps.server.service import Service
from phalanx.ps.snapshot.read import open_snapshot
from phalanx.ps.snapshot.save import save
from phalanx.ps.snapshot_lookup import Lookup
from phalanx.ps.stores.base import PullSpec
from phalanx.ps.stores.remote import RemoteStore
from phalanx.ps.stores.update import TableUpdate
from phalanx.ps.table.rules import FileDtype, Normal, TableSpec
from phalanx.ps.table.update_rules import Adagrad
from ps_kills import WORKERS, Progress, kill_while
from ps_requests import SPEC, FakeWorker, gradient
from ps_servers import SECRET, Server, Worker, servers

pytestmark = pytest.mark.fault

TABLE = TableSpec(name="rows", dim=4, rule=Adagrad(lr=0.1), init=Normal(std=1.0), seed=5)
RETRY = {"PHALANX_SERVER_RETRY_S": "60"}


def ids_of(worker: int, step: int) -> np.ndarray:
    return np.random.default_rng([worker, step]).choice(200, size=30, replace=False).astype(np.int64)


def store(endpoints: Sequence[str], worker: int, mode: str) -> RemoteStore:
    return RemoteStore(
        endpoints,
        secret=SECRET,
        worker=worker,
        workers=WORKERS,
        mode=mode,  # type: ignore[arg-type]
        timeout_s=60.0,
        retry_s=60.0,
    )


def gradients(rows: np.ndarray, worker: int, step: int) -> np.ndarray:
    """What a worker computes depends on what it read, so that a wrong reading shows at the end."""
    return (0.1 * rows + np.float32(worker + 1) / np.float32(step + 1)).astype(np.float32)


def undisturbed(steps: int) -> bytes:
    service = Service()
    workers = [FakeWorker(service, worker) for worker in range(WORKERS)]
    for worker in workers:
        worker.declare(TABLE, mode="sync", workers=WORKERS)
    for step in range(steps):
        for n, worker in enumerate(workers):
            ids = ids_of(n, step)
            rows = worker.pull(*ids, step=step, table="rows").rows[0]
            worker.push(TableUpdate("rows", ids, gradients(rows, n, step)), step=step, weight=n + 1)
    return workers[0].pull(*range(200), step=steps, table="rows").rows[0].tobytes()


@pytest.mark.parametrize(
    ("count", "kills", "max_bytes"),
    [(1, 10, None), (2, 5, None), pytest.param(1, 5, 8000, id="memory for a quarter of the rows")],
)
def test_sync_after_ten_kills_equals_the_undisturbed_run_to_the_bit(
    tmp_path: Path, count: int, kills: int, max_bytes: int | None
) -> None:
    steps = 150
    final: dict[int, bytes] = {}

    def train(worker: int, progress: Progress) -> None:
        remote = store(made.endpoints, worker, "sync")
        remote.declare([replace(TABLE, max_bytes=max_bytes)])
        for step in range(steps):
            ids = ids_of(worker, step)
            (rows,) = remote.pull([PullSpec("rows", ids)], step=step).rows()
            remote.push([TableUpdate("rows", ids, gradients(rows, worker, step))], step=step, weight=worker + 1)
            progress.one()
        (rows,) = remote.pull([PullSpec("rows", np.arange(200))], step=steps).rows()
        final[worker] = rows.tobytes()
        remote.close()

    with servers(count, tmp_path, RETRY, state=True, log_bytes=100_000) as made:
        kill_while(made, steps, kills, 1, train)
        assert all("recovered from" in server.log for server in made)
    assert final[0] == final[1] == undisturbed(steps)


@pytest.mark.parametrize(
    ("count", "kills", "durability", "limit"),
    [
        (1, 5, "process", {}),
        (1, 5, "disk", {}),
        (2, 4, "process", {}),
        # Memory for a quarter of the rows. What they count is so small that rounding leaves the nearest whole number.
        (1, 3, "process", {"max_bytes": 6800, "file_dtype": "bfloat16"}),
        (1, 3, "process", {"max_bytes": 6800, "file_dtype": "int8"}),
    ],
)
def test_async_applies_what_it_acknowledged_and_nothing_twice(
    tmp_path: Path, count: int, kills: int, durability: str, limit: dict[str, Any]
) -> None:
    steps, spec = 150, replace(SPEC, **limit)

    def train(worker: int, progress: Progress) -> None:
        remote = store(made.endpoints, worker, "async")
        remote.declare([spec])
        for step in range(steps):
            ids = ids_of(worker, step)
            remote.pull([PullSpec("items", ids)], step=step).rows()
            remote.push([TableUpdate("items", ids, np.ones((len(ids), 2), np.float32))], step=step)
            progress.one()
        remote.flush()
        remote.close()

    env = {**RETRY, "PHALANX_SERVER_DURABILITY": durability}
    with servers(count, tmp_path, env, state=True, log_bytes=100_000) as made:
        kill_while(made, steps, kills, 2, train)
        remote = store(made.endpoints, 0, "async")
        remote.declare([spec])
        rows = np.rint(remote.pull([PullSpec("items", np.arange(200))]).rows()[0][:, 0])
        pushed = remote.report()["items"].pushed
        remote.close()
    expected = np.zeros(200, np.float32)
    for n in range(WORKERS):
        for step in range(steps):
            expected[ids_of(n, step)] -= 1
    np.testing.assert_array_equal(rows, expected)
    assert pushed == WORKERS * steps * 30


@pytest.mark.parametrize("file_dtype", ["bfloat16", "int8"])
def test_a_killed_server_has_its_rounded_rows_again(tmp_path: Path, file_dtype: FileDtype) -> None:
    # The index fills the memory, so that a row is rounded after each of its changes, whatever is pulled.
    spec = replace(TABLE, max_bytes=1000, file_dtype=file_dtype)
    with servers(1, tmp_path, RETRY, state=True) as (server,):
        remote = store([server.endpoint], 0, "async")
        remote.declare([spec])
        for step in range(2):
            remote.push([TableUpdate("rows", np.arange(200), np.zeros((200, 4), np.float32))], step=step)
        for step in range(2, 100):
            ids = ids_of(0, step)
            (rows,) = remote.pull([PullSpec("rows", ids)], step=step).rows()
            remote.push([TableUpdate("rows", ids, gradients(rows, 0, step))], step=step)
        (before,) = remote.pull([PullSpec("rows", np.arange(200))], step=100).rows()
        server.kill()
        server.start()
        (after,) = remote.pull([PullSpec("rows", np.arange(200))], step=100).rows()
        remote.close()
    np.testing.assert_array_equal(after, before)
    assert "are rounded to" in server.log
    assert "200 rows, 101 logged changes" in server.log


def test_a_server_killed_in_a_save_leaves_the_snapshot_before(tmp_path: Path) -> None:
    where, many = tmp_path / "snapshot", tuple(range(20_000))
    with servers(1, tmp_path, RETRY, state=True) as (server,):
        worker = Worker(server, retry_s=60.0)
        worker.declare()
        worker.push(gradient(many, 1.0), step=0)
        save([worker], where, {"n": 0})
        before = {path.name for path in where.iterdir()}
        worker.push(gradient(many, 1.0), step=1)
        failed: list[PhalanxError] = []

        def save_again() -> None:
            try:
                save([worker], where, {"n": 1})
            except PhalanxError as e:
                failed.append(e)

        thread = threading.Thread(target=save_again)
        thread.start()
        while {path.name for path in where.iterdir()} <= before:
            pass
        server.kill()
        server.start()
        thread.join(60)
        assert "started again since. Save again" in str(failed[0])
        assert open_snapshot(where).extra() == {"n": 0}
        assert Lookup(where).rows("items", np.array([7]))[0, 0] == -1.0
        # The save that is asked for again is whole, and nothing of the others stays.
        save([worker], where, {"n": 2})
        assert Lookup(where).rows("items", np.array([7]))[0, 0] == -2.0
        assert len(list(where.iterdir())) == len(before)
        worker.close()


def test_a_recovery_longer_than_the_patience_of_workers_loses_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, phalanx_propagates: None
) -> None:
    caplog.set_level("INFO", "phalanx.ps.wire")
    released, retry_s, pushes = tmp_path / "released", 15.0, 100
    with servers(1, tmp_path, RETRY, state=True, released=released) as (server,):
        workers = [Worker(server, number, retry_s=retry_s) for number in range(2)]
        for worker in workers:
            worker.declare(workers=2)
        for step in range(pushes):
            workers[0].push(gradient((step,), 1.0), step=step)
        server.kill()
        lost = time.monotonic()
        server.start()
        pulls = [worker.connection.send("report", {}) for worker in workers]
        wait_until(lambda: time.monotonic() > lost + retry_s + 1 and "% of " in caplog.text, 120)
        assert all(pull.outcome is None for pull in pulls)
        released.touch()
        for pull in pulls:
            assert pull.result().meta["tables"]["items"]["pushed"] == pushes
        for worker in workers:
            worker.close()
    for number in range(2):
        assert f"worker {number} waits: server 0 recovers: " in caplog.text
        assert f"worker {number}: server 0 answers again" in caplog.text


def test_a_recovery_that_fails_tells_the_workers_why(tmp_path: Path) -> None:
    released = tmp_path / "released"
    with servers(1, tmp_path, RETRY, state=True, released=released) as (server,):
        worker = Worker(server, retry_s=60.0)
        worker.declare()
        for step in range(60):
            worker.push(gradient((step,), 1.0), step=step)
        worker.close()
        server.kill()
        (log,) = (tmp_path / "0").glob("log-*")
        content = bytearray(log.read_bytes())
        content[-200] ^= 1
        log.write_bytes(content + content[:100])
        server.start()
        waiting = Worker(server, 1)
        pending = waiting.connection.send("report", {})
        wait_until(lambda: pending.server_state.startswith("recovers: "))
        released.touch()
        with pytest.raises(
            PeerLostError, match=r"it cannot start: .*/log-00000001 is broken at byte \d+: .*damaged it"
        ):
            pending.result()
        waiting.close()
        assert server.end() == 1


def limit_file_size(server: Server, size: int) -> None:
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_a_full_disk_refuses_pushes_and_saves_and_both_go_on_after(tmp_path: Path) -> None:
    where, many = tmp_path / "snapshot", tuple(range(2000))
    with servers(1, tmp_path, state=True) as (server,):
        worker = Worker(server)
        worker.declare()
        worker.push(gradient(many, 1.0), step=0)
        save([worker], where, {"n": 0})
        (log,) = (tmp_path / "0").glob("log-*")
        limit_file_size(server, log.stat().st_size + 100)
        with pytest.raises(BackendError, match=r"log in .*, which has \d+ bytes free: File too large.*push again"):
            worker.push(gradient(many, 1.0), step=1)
        assert worker.pull(7, step=1).rows[0][0, 0] == -1.0
        limit_file_size(server, 50)
        with pytest.raises(BackendError, match=r"bytes free: File too large\. The snapshot that was there stays"):
            save([worker], where, {"n": 1})
        assert open_snapshot(where).extra() == {"n": 0}
        limit_file_size(server, resource.RLIM_INFINITY)
        worker.push(gradient(many, 1.0), step=1)
        save([worker], where, {"n": 2})
        assert Lookup(where).rows("items", np.array([7]))[0, 0] == -2.0
        worker.close()
