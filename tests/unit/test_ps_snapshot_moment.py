"""The moment of a snapshot over several servers, in one process: what its manifest says is what its rows hold."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import BackendError, PeerLostError
from phalanx.ps.server.moved_state import difference
from phalanx.ps.server.service import Service
from phalanx.ps.server.snapshots.snapshot_service import SnapshotService
from phalanx.ps.snapshot.save import FREEZE_S, LocalAnswer, save
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


def test_the_state_for_other_servers_says_that_a_change_is_not_answered() -> None:
    """Its worker would ask those for it again: they know of no earlier request."""
    service, (worker, _) = served("async")
    asking, states = FakeWorker(service, 9), list[dict[str, Any]]()

    def ask_state() -> None:
        asking.call("freeze", {"token": "a", "seconds": 60, "hold": True})
        states.append(asking.call("state", {"token": "a"}).meta["state"])
        asking.call("resume", {"token": "a"})

    service.write_base = ask_state
    service.state.unlogged = True
    worker.call("shrink", {"table": "items"})
    ask_state()
    assert [difference([state]) for state in states] == ["a change that is done and not answered yet", ""]


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
        """Answers its first request when the other server's freeze is over, and that has taken a step."""

        def send(self, op: str, meta: Mapping[str, Any]) -> LocalAnswer:
            answer = FakeWorker(second, 9).send(op, meta)
            if not asked:
                now[0] += FREEZE_S
                two.push(gradient((1,), 1.0), step=0)
                for worker in (one, two):
                    worker.push(gradient((1,), 1.0), step=1)
            asked.append(op)
            return answer

    with pytest.raises(BackendError, match=r"no one moment.*\[\[2, 2\], \[1, 1\]\].*Save again"):
        save([FakeWorker(first, 9), SlowServer()], tmp_path / "save", {})
    assert "snapshot" not in asked
    assert asked[-1] == "resume"
    assert list((tmp_path / "save").iterdir()) == []


class Participant:
    """A server of which a test sees what is asked and when its answers are read."""

    def __init__(self, number: int, events: list[tuple[str, int, str]], failing: tuple[str, str] = ("", "")) -> None:
        self._number, self._events, self._failing = number, events, failing
        service = Service()
        self.snapshots = SnapshotService(service)
        self._worker = FakeWorker(service, 9)

    def send(self, op: str, meta: Mapping[str, Any]) -> ReadAnswer:
        self._events.append(("send", self._number, op))
        if self._failing == ("send", op):
            raise PeerLostError("server 1 is gone.")
        return ReadAnswer(lambda: self._read(op, meta))

    def _read(self, op: str, meta: Mapping[str, Any]) -> RpcReply:
        self._events.append(("read", self._number, op))
        if self._failing == ("read", op):
            raise PeerLostError("server 1 is gone.")
        return self._worker.call(op, dict(meta))


class ReadAnswer:
    def __init__(self, read: Callable[[], RpcReply]) -> None:
        self.result = read


def test_every_participant_is_asked_before_an_answer_is_read(tmp_path: Path) -> None:
    """A freeze then takes as long as the slowest, not as long as all together."""
    events: list[tuple[str, int, str]] = []
    save([Participant(number, events) for number in range(3)], tmp_path / "save", {})
    expected = [
        (kind, number, op)
        for op in ("freeze", "snapshot", "resume", "saved")
        for kind in ("send", "read")
        for number in range(3)
    ]
    assert [event for event in events if event[2] != "saved"] == expected[:-6]
    assert events[len(expected) - 6 : len(expected)] == expected[-6:]


@pytest.mark.parametrize("op", ["freeze", "snapshot", "resume"])
@pytest.mark.parametrize("kind", ["send", "read"])
def test_a_participant_that_fails_leaves_none_frozen(tmp_path: Path, kind: str, op: str) -> None:
    events: list[tuple[str, int, str]] = []
    participants = [Participant(0, events), Participant(1, events, (kind, op)), Participant(2, events)]
    if op == "resume":  # its own freeze ends at its deadline, and the save is whole
        save(participants, tmp_path / "save", {})
    else:
        with pytest.raises(PeerLostError, match="server 1 is gone"):
            save(participants, tmp_path / "save", {})
    assert [number for kind, number, op in events if (kind, op) == ("send", "resume")] == [0, 1, 2]
    assert {0, 2} <= {number for kind, number, op in events if (kind, op) == ("read", "resume")}
    for participant in participants:
        participant.snapshots.stop()
