"""Servers as processes: how they begin and end, snapshots over several of them, and what a restart finds."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launching import wait_until
from phalanx.errors import ConfigError, PeerLostError
from phalanx.ps.server.main import TICK_S
from phalanx.ps.snapshot.read import open_snapshot
from phalanx.ps.snapshot.save import save
from phalanx.ps.snapshot_lookup import Lookup
from phalanx.ps.table.placement import owner_of, shard_of, table_salt
from phalanx.ps.wire.message import RpcReply
from ps_requests import SPEC, gradient
from ps_servers import Server, Worker, servers

pytestmark = pytest.mark.dist

RETRY = {"PHALANX_SERVER_RETRY_S": "60"}


def joined(made: list[Server], workers: int, mode: str, **options: float) -> list[list[Worker]]:
    """Return each worker's connections, by server, its tables declared."""
    all_workers = [
        [Worker(server, worker, rank=n, **options) for n, server in enumerate(made)] for worker in range(workers)
    ]
    for of_worker in all_workers:
        for worker in of_worker:
            worker.declare(mode=mode, workers=workers)
    return all_workers


def close(workers: list[list[Worker]]) -> None:
    for of_worker in workers:
        for worker in of_worker:
            worker.close()


def parts(ids: np.ndarray, count: int) -> list[tuple[int, ...]]:
    owners = owner_of(shard_of(ids, table_salt(SPEC.name)), count)
    return [tuple(ids[owners == n].tolist()) for n in range(count)]


def push(of_worker: list[Worker], ids: np.ndarray, value: float, step: int, weight: float = 1.0) -> None:
    for worker, part in zip(of_worker, parts(ids, len(of_worker)), strict=True):
        worker.push(gradient(part, value), step=step, weight=weight)


def values(directory: Path, ids: np.ndarray) -> list[float]:
    return Lookup(directory).rows(SPEC.name, ids)[:, 0].tolist()


def test_a_server_ends_when_all_workers_have_left(tmp_path: Path) -> None:
    with servers(1, tmp_path) as (server,):
        workers = joined([server], 2, "async")
        workers[0][0].push(gradient((1,), 1.0), step=0)
        assert workers[1][0].pull(1).rows[0].tolist() == [[-1.0, -1.0]]
        for (worker,) in workers:
            worker.call("leave", {})
        close(workers)
        assert server.end() == 0
        assert f"server 0 of 1 at {server.endpoint}: state in memory only" in server.log
        assert "all workers have left" in server.log


def test_a_server_stays_for_a_worker_that_left_and_still_reads(tmp_path: Path) -> None:
    with servers(1, tmp_path) as (server,):
        (one,), (two,) = joined([server], 2, "sync")
        for worker in (one, two):
            worker.push(gradient((1,), 1.0), step=0)
        for worker in (one, two):
            worker.call("leave", {})
        two.close()
        assert server.process is not None
        server.process.join(5 * TICK_S)
        assert one.pull(1, step=1).rows[0][0, 0] == -1.0
        save([one], tmp_path / "save", {})
        server.terminate()
        assert server.end() == 0
        one.close()


def test_a_server_that_is_ended_from_outside_shows_it(tmp_path: Path) -> None:
    with servers(1, tmp_path) as (server,):
        ((worker,),) = joined([server], 1, "async")
        server.terminate()
        assert server.end() == -signal.SIGTERM
        with pytest.raises(PeerLostError, match=r"worker 0 asked server 0 at .* it closed the connection"):
            worker.pull(1)
        worker.close()
        assert "ended by SIGTERM before all workers had left" in server.log


def test_a_server_that_ended_from_outside_can_be_started_again(tmp_path: Path) -> None:
    with servers(1, tmp_path, RETRY, state=True) as (server,):
        ((worker,),) = joined([server], 1, "async", retry_s=60.0)
        worker.push(gradient((1,), 1.0), step=0)
        server.terminate()
        server.end()
        server.start()
        worker.push(gradient((1,), 1.0), step=1)
        assert worker.pull(1, step=2).rows[0][0, 0] == -2.0
        worker.close()


def test_one_worker_saves_in_sync_while_the_others_are_ahead(tmp_path: Path) -> None:
    """The others may have pushed a step that the saving worker makes only after the save."""
    ids = np.arange(10)
    with servers(2, tmp_path) as made:
        workers = joined(made, 2, "sync")
        for of_worker in workers:
            push(of_worker, ids, 1.0, 0)
        push(workers[1], ids, 1.0, 1)
        manifest = save(workers[0], tmp_path / "save", {})
        assert manifest.steps == [1, 1]
        assert set(values(tmp_path / "save", ids)) == {-1.0}
        push(workers[0], ids, 1.0, 1)
        assert workers[0][0].pull(*parts(ids, 2)[0], step=2).rows[0][0, 0] == -2.0
        close(workers)


def test_a_worker_that_vanishes_is_named_to_the_others_and_fails_the_server(tmp_path: Path) -> None:
    with servers(1, tmp_path) as (server,):
        (one,), (two,) = workers = joined([server], 2, "sync")
        one.push(gradient((1,), 1.0), step=0)
        two.close()
        with pytest.raises(PeerLostError, match=r"lost worker 1 \(at step 0\)"):
            one.pull(1, step=1)
        close(workers)
        assert server.end() == 1
        assert "lost worker 1" in server.log


def test_a_restarted_worker_is_waited_for(tmp_path: Path) -> None:
    with servers(1, tmp_path, RETRY) as (server,):
        (one,), (two,) = joined([server], 2, "sync")
        one.push(gradient((1,), 1.0), step=0)
        two.close()
        again = Worker(server, 1)
        assert again.declare(mode="sync", workers=2)["step"] == 0
        again.push(gradient((1,), 1.0), step=0)
        assert one.pull(1, step=1).rows[0][0, 0] == -1.0
        one.close()
        again.close()


def in_background(function: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_snapshot_is_one_moment_of_all_servers(tmp_path: Path, mode: str) -> None:
    """Each step adds the same to every id, so a snapshot with half a step in it would show."""
    ids, steps, workers_count = np.arange(64), 120, 2
    with servers(3, tmp_path) as made:
        workers = joined(made, workers_count, mode)
        coordinator = [Worker(server, 9, rank=n) for n, server in enumerate(made)]
        threads = [
            in_background(lambda of_worker=of_worker: [push(of_worker, ids, 1.0, step) for step in range(steps)])  # type: ignore[misc]
            for of_worker in workers
        ]
        for n in range(4):
            manifest = save(coordinator, tmp_path / f"save-{n}", {"n": n})
            found = values(tmp_path / f"save-{n}", ids)
            assert len(set(found)) == 1, found
            assert manifest.steps is not None
            if mode == "sync":
                assert -found[0] == min(manifest.steps)
            else:
                assert -found[0] == sum(manifest.steps)
        for thread in threads:
            thread.join()
        for of_worker in workers:
            for worker in of_worker:
                worker.call("leave", {})
        close([*workers, coordinator])
        assert [server.end() for server in made] == [0, 0, 0]


def test_a_snapshot_in_sync_ends_the_step_under_way(tmp_path: Path) -> None:
    ids = np.arange(10)
    with servers(2, tmp_path) as made:
        workers = joined(made, 2, "sync")
        coordinator = [Worker(server, 9, rank=n) for n, server in enumerate(made)]
        push(workers[0], ids, 1.0, 0)
        saving = in_background(lambda: save(coordinator, tmp_path / "save", {}))  # type: ignore[func-returns-value]
        push(workers[1], ids, 1.0, 0)
        saving.join()
        assert set(values(tmp_path / "save", ids)) == {-1.0}
        close([*workers, coordinator])


def test_no_server_waits_for_a_step_that_another_holds_back(tmp_path: Path) -> None:
    ids = np.arange(10)
    with servers(2, tmp_path) as made:
        workers = joined(made, 2, "sync")
        push(workers[0], ids, 1.0, 0)
        coordinator = [Worker(server, 9, rank=n) for n, server in enumerate(made)]
        pushing: list[threading.Thread] = []

        class LastOfTheFirstRound:
            """Lets worker 1 begin its step, at server 1 first, when both servers are frozen."""

            def send(self, op: str, meta: Mapping[str, Any]) -> LastOfTheFirstRound:
                self._pending = coordinator[1].send(op, meta)
                return self

            def result(self) -> RpcReply:
                reply: RpcReply = self._pending.result()
                if not pushing:
                    pushing.append(in_background(second_worker))
                return reply

        def second_worker() -> None:
            for n in (1, 0):
                workers[1][n].push(gradient(parts(ids, 2)[n], 1.0), step=0)

        save([coordinator[0], LastOfTheFirstRound()], tmp_path / "save", {})
        pushing[0].join()
        assert set(values(tmp_path / "save", ids)) == {-1.0}
        close([*workers, coordinator])


def test_one_three_and_two_servers_continue_one_snapshot(tmp_path: Path) -> None:
    ids = np.arange(100)
    for day, count in enumerate([1, 3, 2]):
        options = {"load": str(tmp_path / str(day - 1))} if day else {}
        with servers(count, tmp_path, **options) as made:
            ((workers),) = joined(made, 1, "async")
            push(workers, ids, 1.0, 0)
            push(workers, ids + 1000 * day, 1.0, 1)
            save(workers, tmp_path / str(day), {"day": day})
            close([workers])
    assert values(tmp_path / "2", np.array([0, 99, 1000, 1099, 2000, 2099])) == [-4.0, -4.0, -1.0, -1.0, -1.0, -1.0]
    assert open_snapshot(tmp_path / "2").manifest.rows == {"items": 300}


def test_load_by_operation_and_a_delta_on_it(tmp_path: Path) -> None:
    ids = np.arange(20)
    with servers(2, tmp_path, state=True) as made:
        (workers,) = joined(made, 1, "async")
        push(workers, ids, 1.0, 0)
        save(workers, tmp_path / "full", {})
        push(workers, ids, 1.0, 1)
        for worker in workers:
            worker.call("load", {"directory": str(tmp_path / "full"), "names": ["items"]})
        push(workers, ids[:1], 1.0, 2)
        manifest = save(workers, tmp_path / "delta", {}, "delta")
        assert manifest.rows == {"items": 1}
        assert values(tmp_path / "delta", ids[:2]) == [-2.0, -1.0]
        with pytest.raises(ConfigError, match="Asked for table 'other'"):
            workers[0].call("load", {"directory": str(tmp_path / "full"), "names": ["other"]})
        close([workers])
        # The load was no push, and is there all the same after a crash.
        for server in made:
            server.kill()
            server.start()
        (workers,) = joined(made, 1, "async")
        (part, _) = parts(ids, 2)
        assert set(workers[0].pull(*part[1:], step=3).rows[0][:, 0].tolist()) == {-1.0}
        save(workers, tmp_path / "delta-2", {}, "delta")
        assert values(tmp_path / "delta-2", ids[:2]) == [-2.0, -1.0]
        close([workers])


def test_leases_are_in_a_snapshot(tmp_path: Path) -> None:
    files = {"epoch": 0, "files": ["a", "b"]}
    with servers(1, tmp_path) as made:
        (workers,) = joined(made, 1, "async")
        assert workers[0].call("lease", files).meta["file"] == "a"
        workers[0].call("done", {"epoch": 0, "file": "a", "offset": 70, "end": False})
        save(workers, tmp_path / "save", {})
        workers[0].call("done", {"epoch": 0, "file": "a", "offset": 90})
        assert workers[0].call("lease", files).meta["file"] == "b"
        # Nobody reads a file after a load; reading continues where the snapshot says.
        workers[0].call("load", {"directory": str(tmp_path / "save")})
        again = workers[0].call("lease", files).meta
        assert (again["file"], again["offset"]) == ("a", 70)
        close([workers])


def test_a_base_snapshot_takes_the_place_of_the_log(tmp_path: Path) -> None:
    with servers(1, tmp_path, state=True, log_bytes=20_000) as (server,):
        ((worker,),) = joined([server], 1, "async")
        many = tuple(range(2000))
        for step in range(20):
            worker.push(gradient(many, 1.0), step=step)
        state = tmp_path / "0"
        assert worker.call("report", {}).meta["log_bytes"] > 0
        base = wait_until(lambda: [p for p in state.glob("base-*") if not p.name.endswith(".part")])
        assert open_snapshot(base[0]).manifest.rows == {"items": 2000}
        worker.push(gradient((7,), 1.0), step=20)
        worker.close()
        server.kill()
        server.start()
        ((worker,),) = joined([server], 1, "async")
        assert worker.pull(7, 8, step=21).rows[0][:, 0].tolist() == [-21.0, -20.0]
        report = worker.call("report", {}).meta
        assert report["tables"]["items"]["pushed"] == 40_001
        assert report["steps"] == [21]
        worker.close()


def test_text_is_written_by_each_server(tmp_path: Path) -> None:
    ids = np.arange(30)
    with servers(2, tmp_path) as made:
        (workers,) = joined(made, 1, "async")
        push(workers, ids, 0.5, 0)
        save(workers, tmp_path / "text", {}, "text")
        close([workers])
    lines = [(tmp_path / "text" / f"part-{n}").read_text().splitlines() for n in range(2)]
    assert all(lines)
    assert sorted(int(line.split("\t")[1]) for part in lines for line in part) == ids.tolist()
    assert {line.split("\t")[2] for part in lines for line in part} == {"-0.5 -0.5"}


def test_an_unwritable_folder_fails_the_save_alone(tmp_path: Path) -> None:
    with servers(1, tmp_path) as made:
        (workers,) = joined(made, 1, "async")
        worker = workers[0]
        worker.push(gradient((1,), 1.0), step=0)
        with pytest.raises(ConfigError, match=r"no operation 'freez'\. Did you mean 'freeze'"):
            worker.call("freez", {})
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match=r"Asked to save to .*file: File exists. Give a folder"):
            save(workers, tmp_path / "file", {})
        worker.push(gradient((1,), 1.0), step=1)
        assert worker.pull(1, step=2).rows[0][0, 0] == -2.0
        close([workers])


def test_a_renamed_table_is_said_by_server_0(tmp_path: Path) -> None:
    with servers(1, tmp_path) as made:
        (workers,) = joined(made, 1, "async")
        push(workers, np.arange(4), 1.0, 0)
        save(workers, tmp_path / "day1", {})
        close([workers])
    (tmp_path / "day2").mkdir()
    with servers(2, tmp_path / "day2", load=str(tmp_path / "day1")) as made:
        for rank, server in enumerate(made):
            worker = Worker(server, rank=rank)
            worker.declare(replace(SPEC, name="item"))
            worker.call("leave", {})
            worker.close()
        assert [server.end() for server in made] == [0, 0]
        assert "table 'item' starts fresh" in made[0].log
        assert "Did you mean 'item'?" in made[0].log
        assert "table 'items'" not in made[1].log
