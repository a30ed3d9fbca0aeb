"""A worker is killed in the midst of a push while one of its servers is away: what the others count of it, and say."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from launching import wait_until
from phalanx.launch.elastic.workers.sign_off import SignOff, SplitPush
from phalanx.ps.stores.base import PullSpec
from phalanx.ps.stores.remote import RemoteStore
from phalanx.ps.stores.update import TableUpdate
from ps_requests import SPEC
from ps_servers import SECRET, Servers, Worker, servers

pytestmark = pytest.mark.fault

VICTIM = """
import json, sys
import numpy as np
from phalanx.ps.stores.remote import RemoteStore
from phalanx.ps.stores.update import TableUpdate
from ps_requests import SPEC
from ps_servers import SECRET

endpoints, mode = json.loads(sys.argv[1])
store = RemoteStore(endpoints, secret=SECRET, worker=1, workers=2, mode=mode, retry_s=60.0)
store.declare([SPEC])
ids = np.arange(32)
for step, gradient in enumerate((1.0, 5.0)):
    store.push([TableUpdate("items", ids, np.full((32, 2), gradient, np.float32))], step=step)
    if step == 0:
        store.flush()
        print("pushed", flush=True)
        input()
store.flush()
"""
IDS = np.arange(32)


@contextmanager
def victim(job: Servers, mode: str) -> Iterator[subprocess.Popen[str]]:
    """A worker 1 that has pushed one step, and pushes the next once it gets a line."""
    command = [sys.executable, "-c", VICTIM, json.dumps([job.endpoints, mode])]
    path = {"PYTHONPATH": ":".join(sys.path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=path) as process:
        try:
            yield process
        finally:
            process.kill()


CASES: dict[str, tuple[str, bool, SplitPush | None, set[float]]] = {
    # Whether the other worker pushes the step too before the victim is signed off, what is in part, and what rows have.
    "sync, the step is open": ("sync", False, None, {-2.0}),
    "sync, the step is complete": ("sync", True, SplitPush(1, [0], [1]), {-4.0, -2.0}),
    "async": ("async", False, SplitPush(1, [0], [1]), {-8.0, -3.0}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_push_to_some_servers_counts_on_none_or_is_named_however_long_a_server_is_away(
    case: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mode, is_complete, split, expected = CASES[case]
    monkeypatch.setattr("phalanx.launch.elastic.workers.sign_off.CONNECT_S", 0.1)
    monkeypatch.setattr("phalanx.launch.elastic.workers.sign_off.WARN_S", 0.0)
    push = [TableUpdate("items", IDS, np.ones((len(IDS), 2), np.float32))]
    with servers(2, state=True, env={"PHALANX_SERVER_RETRY_S": "60"}) as job, victim(job, mode) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        store = RemoteStore(job.endpoints, secret=SECRET, worker=0, workers=2, mode=mode, retry_s=60.0)  # type: ignore[arg-type]
        store.declare([SPEC])
        store.push(push, step=0)
        assert process.stdout.readline() == "pushed\n"
        store.flush()
        job[1].kill()
        process.stdin.write("\n")
        process.stdin.flush()
        spectator = Worker(job[0])

        def steps() -> list[int]:
            return list(spectator.call("report", {}).meta["steps"])

        wait_until(lambda: steps() == [1, 2])
        process.kill()
        pushing = threading.Thread(target=store.push, args=(push,), kwargs={"step": 1})  # waits for server 1
        if is_complete:
            pushing.start()
            wait_until(lambda: steps() == [2, 2])
        sign_off = SignOff(job.endpoints, SECRET, 1, 2)
        wait_until(lambda: "server 1 could not be told" in caplog.text)
        assert not sign_off.is_done
        job[1].start()
        wait_until(lambda: sign_off.is_done)
        assert sign_off.split_push == split
        if not is_complete:
            pushing.start()
        pushing.join()
        (rows,) = store.pull([PullSpec("items", IDS)], step=2).rows()
        assert set(rows.ravel().tolist()) == expected
        spectator.close()
        store.close()


def test_the_end_of_an_attempt_ends_what_was_to_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.launch.elastic.workers.sign_off.CONNECT_S", 0.1)
    with servers(2, state=True, started=False) as job:
        job[0].start()
        sign_off = SignOff(job.endpoints, SECRET, 1, 2)
        spectator = Worker(job[0])
        wait_until(lambda: spectator.call("report", {}).meta["live"] == [0, 1])
        sign_off.stop()
        wait_until(lambda: not any(thread.name.startswith("sign off worker 1") for thread in threading.enumerate()))
        job[1].start()
        late = Worker(job[1], rank=1)
        late.declare(workers=2)
        # The server of the next attempt has this worker alone to count, and nobody signs off another.
        assert late.call("report", {}).meta["live"] == [0, 1]
        assert not sign_off.is_done
        for worker in (spectator, late):
            worker.close()


def test_a_server_that_refuses_for_long_is_named_and_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.launch.elastic.workers.sign_off.REFUSED_S", 0.7)
    with servers(1) as job:
        worker = Worker(job[0])
        worker.declare(workers=2)
        sign_off = SignOff(job.endpoints, SECRET, 5, 2)  # a number that no worker of two has
        assert sign_off.refusal == ""
        wait_until(lambda: sign_off.refusal)
        assert sign_off.refusal.startswith(
            "server 0 has answered with an error for 1 s when told that worker 5 is lost: "
        )
        assert sign_off.refusal.endswith("Read serverlog.0, fix the cause, and start the job again")
        wait_until(lambda: not any(thread.name.startswith("sign off worker 5") for thread in threading.enumerate()))
        assert not sign_off.is_done
        worker.close()
