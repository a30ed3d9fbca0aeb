"""The moment of a snapshot over several servers, in one process: what its manifest says is what its rows hold."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import BackendError
from phalanx.ps.server.service import Service
from phalanx.ps.server.snapshot_service import SnapshotService
from phalanx.ps.snapshot.save import FREEZE_S, save
from phalanx.ps.wire.message import RpcReply
from ps_requests import FakeWorker, gradient


def served(mode: str, clock: Callable[[], float] = time.monotonic) -> tuple[Service, list[FakeWorker]]:
    """Return a server that takes part in snapshots, and its two workers."""
    service = Service(clock=clock)
    SnapshotService(service)
    workers = [FakeWorker(service, worker) for worker in range(2)]
    for worker in workers:
        worker.declare(mode=mode, workers=2)
    return service, workers


def test_the_steps_of_a_snapshot_are_those_in_its_tables() -> None:
    """The last push of a step is counted before the step is in the tables; the answer is not made in between."""
    service, (one, _) = served("sync")
    one.push(gradient((1,), 1.0), step=0)
    answers = list[Any]()
    asking = FakeWorker(service, 9)
    meta = {"token": "a", "seconds": 60, "steps": [1, 1], "wait": True}
    freeze = threading.Thread(target=lambda: answers.append(asking.call("freeze", meta).meta))
    with service.write_freeze.push(1, 0):  # as the engine lets a push in
        clocks = service.state.require_clocks()
        clocks.push(1)
        freeze.start()
        freeze.join(0.2)
        assert freeze.is_alive()
        clocks.apply(1)
    freeze.join(10)
    assert [answer["pushed"] for answer in answers] == [[1, 1]]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_server_that_let_go_while_another_answered_fails_the_save(tmp_path: Path, mode: str) -> None:
    """It has pushes then that the other has not: half a step would be in the snapshot."""
    now = [0.0]
    first, (one, two) = served(mode, clock=lambda: now[0])
    second, others = served(mode)
    one.push(gradient((1,), 1.0), step=0)
    for other in others:
        other.push(gradient((2,), 1.0), step=0)
    asked: list[str] = []

    class SlowServer:
        """Answers its first request when the other server's freeze is over, and that has gone on for a step."""

        def call(self, op: str, meta: Mapping[str, Any]) -> RpcReply:
            reply = FakeWorker(second, 9).call(op, dict(meta))
            if not asked:
                now[0] += FREEZE_S
                two.push(gradient((1,), 1.0), step=0)
                for worker in (one, two):
                    worker.push(gradient((1,), 1.0), step=1)
            asked.append(op)
            return reply

    with pytest.raises(BackendError, match=r"no one moment.*\[\[2, 2\], \[1, 1\]\].*Save again"):
        save([FakeWorker(first, 9), SlowServer()], tmp_path / "save", {})
    assert "snapshot" not in asked
    assert asked[-1] == "resume"
    assert list((tmp_path / "save").iterdir()) == []
