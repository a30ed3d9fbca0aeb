"""Workers beside servers that come and go: who is started, who leaves, when the job cannot continue, who is frozen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launching import wait_until
from phalanx.cluster import proc
from phalanx.errors import LaunchError
from phalanx.launch.elastic.joiners import RestartBudget
from phalanx.launch.elastic.workers.frozen_workers import FrozenWorkers, read_awaited
from phalanx.launch.elastic.workers.sign_off import SplitPush
from phalanx.launch.elastic.workers.worker_pool import WorkerPool
from phalanx.launch.job.registry import render
from phalanx.launch.request.elastic import WorkerRange
from phalanx.ps.server.status import awaited_workers


def pool(least: int = 1, most: int = 3, restarts: int | None = None) -> WorkerPool:
    return WorkerPool(limits=WorkerRange(least=least, most=most), budget=RestartBudget(restarts, restarts or 0))


def test_a_lost_worker_is_started_again_under_its_number_once_the_servers_know() -> None:
    workers = pool()
    event = workers.lose(1, "worker 1 was killed by SIGKILL", now=100.0)
    assert (event["ranks"], event["planned"], event["lost"]) == (2, False, ["worker 1"])
    assert workers.startable(0.0) == []
    assert workers.is_waiting(0.0)
    workers.sign_off(1)
    assert workers.startable(0.0) == [1]
    event = workers.start(1, 101.0, clock=0.0)
    assert (event["reason"], event["joined"]) == ("worker 1 takes the place of a lost one", ["worker 1"])
    assert workers.startable(0.0) == []
    assert [e["epoch"] for e in workers.status()["events"]] == [1, 2]


def test_a_push_that_some_servers_alone_have_is_an_event_of_its_own() -> None:
    workers = pool()
    workers.lose(1, "worker 1 was killed by SIGKILL", now=100.0)
    event = workers.sign_off(1, SplitPush(7, [0, 2], [1]), now=101.0)
    assert event is not None
    assert {name: event[name] for name in ("kind", "worker", "push", "servers", "missing")} == {
        "kind": "split_push", "worker": 1, "push": 7, "servers": [0, 2], "missing": [1],
    }  # fmt: skip
    assert event["reason"].startswith(
        "push 7 of worker 1 is in the tables of server 0 and server 2 and not in those of"
    )
    job = {"job_id": "j", "script": "s.py", "mode": "ps", "pid": 1, "age_s": 1.0, "processes": []}
    shown = render([{**job, "elastic": workers.status()}]).splitlines()
    assert [line.split("  ")[-1] for line in shown[-2:]] == [
        "epoch 1: worker 1 was killed by SIGKILL", event["reason"],
    ]  # fmt: skip
    assert workers.startable(0.0) == [1]


def test_lost_workers_are_replaced_as_long_as_the_budget_pays() -> None:
    workers = pool(restarts=1)
    for worker in (0, 1):
        workers.lose(worker, "killed", now=0.0)
        workers.sign_off(worker)
    assert workers.startable(0.0) == [0]
    workers.start(0, 0.0, clock=0.0)
    assert (workers.startable(0.0), workers.are_unreplaced(0.0)) == ([], True)
    assert workers.refusal(0.0) == ""
    assert not workers.is_waiting(0.0)


def test_a_job_ends_when_fewer_are_left_than_it_may_have_and_none_can_come() -> None:
    workers = pool(least=2, restarts=0)
    workers.lose(0, "killed", now=0.0)
    assert workers.refusal(0.0) == ""
    workers.lose(1, "killed", now=0.0)
    assert workers.refusal(0.0).startswith("1 of at least 2 workers are left, and all 0 of --max-restarts 0 are used")
    assert pool(least=3, restarts=5).refusal(0.0) == ""


def test_a_worker_that_has_finished_counts_and_is_not_replaced() -> None:
    workers = pool(least=3)
    assert workers.finish(2, now=0.0) is None
    assert (workers.startable(0.0), workers.refusal(0.0)) == ([], "")
    # What the others still have may be lost, so that one is started when all but it have finished.
    workers.finish(0, now=0.0)
    workers.lose(1, "killed", now=0.0)
    workers.sign_off(1)
    assert workers.startable(0.0) == [1]


def test_scaling_asks_the_last_workers_to_leave_and_starts_others_again() -> None:
    workers = pool(most=4)
    assert workers.scale(2) == "2 workers instead of 4"
    assert workers.leaving == {2, 3}
    event = workers.finish(3, now=0.0)
    assert event is not None
    assert (event["reason"], event["planned"], event["left"]) == ("worker 3 left", True, ["worker 3"])
    workers.lose(2, "did not leave", now=0.0)
    workers.sign_off(2)
    assert workers.startable(0.0) == []
    workers.scale(4)
    assert workers.startable(0.0) == [2, 3]
    with pytest.raises(LaunchError, match=r"Asked for 5 workers.*--worker-num 1:4"):
        workers.scale(5)


def test_a_worker_that_is_stopped_for_longer_than_the_patience_is_frozen() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        frozen = FrozenWorkers(2.0, [])
        assert frozen.look({0: process.pid}, now=10.0) == {}
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert frozen.look({0: process.pid}, now=11.0) == {}
        assert frozen.look({0: process.pid}, now=13.0) == {0: "is frozen: stopped by a signal for 2.0 s"}
        os.kill(process.pid, signal.SIGCONT)
        process.kill()


def test_a_worker_that_does_nothing_while_servers_wait_for_it_is_frozen(tmp_path: Path) -> None:
    status = tmp_path / "status.server.0.json"
    status.write_text(json.dumps({"time": time.time(), "awaited": [[0, 7]]}))
    with subprocess.Popen(["sleep", "60"]) as process:
        wait_until(lambda: proc.state(process.pid) == "S")
        frozen = FrozenWorkers(1.0, [str(status)])
        for now in (10.0, 10.5, 11.5, 12.0):
            assert frozen.look({0: process.pid}, now) == {}
        reason = frozen.look({0: process.pid}, 13.5)[0]
        assert reason.startswith("is frozen: no processor time and no I/O for 2.0 s")
        process.kill()


def test_a_worker_that_has_ended_and_is_waited_for_is_noticed(tmp_path: Path) -> None:
    status = tmp_path / "status.server.0.json"
    status.write_text(json.dumps({"time": time.time() + 100.0, "awaited": [[2, 7]]}))
    frozen = FrozenWorkers(1.0, [str(status)])
    awaited = []
    for now in (10.0, 15.0, 17.0):
        assert frozen.look({0: os.getpid()}, now) == {}
        awaited.append(frozen.find_awaited(now))
    assert awaited == [set(), set(), {2}]
    frozen.forget(2)
    assert frozen.find_awaited(17.5) == set()


def test_whom_servers_wait_for_is_read_from_what_they_report(tmp_path: Path) -> None:
    path = tmp_path / "status.server.0.json"
    assert read_awaited(str(path)) == []
    path.write_text(json.dumps({"time": time.time(), "awaited": [[1, 7]]}))
    assert read_awaited(str(path)) == [(1, 7)]
    path.write_text(json.dumps({"time": time.time() - 60, "awaited": [[1, 7]]}))
    assert read_awaited(str(path)) == []  # that server is away
    for broken in ("3", "[1]", '[["x", 1]]', "{}"):
        path.write_text(f'{{"time": {time.time()}, "awaited": {broken}}}')
        assert read_awaited(str(path)) == []
    for broken in ("", "[]", "{}", '{"time": "x", "awaited": []}', "\xff"):
        path.write_text(broken)
        assert read_awaited(str(path)) == []


def test_a_worker_that_waits_for_the_server_itself_is_not_awaited() -> None:
    clocks: Any = SimpleNamespace(mode="sync", live={0, 1, 2}, steps=[7, 7, 8])
    assert awaited_workers(clocks, set()) == [(0, 7), (1, 7)]
    assert awaited_workers(clocks, {1}) == [(0, 7)]
    clocks.mode = "async"
    assert awaited_workers(clocks, set()) == []
