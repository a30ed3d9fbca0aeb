"""What an attempt does while the number of its servers changes: whom it watches, and what it refuses meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.errors import LaunchError
from phalanx.launch.elastic.joiners import RestartBudget
from phalanx.launch.elastic.workers.frozen_workers import FrozenWorkers
from phalanx.launch.job.servers import hand_over
from phalanx.launch.job.servers.hand_over import HandOverPhase
from phalanx.launch.job.workers_attempt import WorkersAttempt
from phalanx.launch.request.elastic import WorkerRange
from server_changes import FakeHandOver, Job


class Attempt(WorkersAttempt):
    """An attempt beside fakes of all that it tells of its processes."""

    def __init__(self, job: Job) -> None:
        self.watched: list[list[str]] = []
        self.rows: list[list[int]] = []
        super().__init__(
            starter=job.starter,
            console=SimpleNamespace(follow_another=lambda title, path: None),
            stops=None,
            link=None,
            restarts=1,
            stop_grace_s=30.0,
            check_disk_space=lambda: None,
            on_started=lambda pids: self.rows.append([pids[process.id] for process in self.layout.local]),
            on_servers=lambda line: None,
            on_hang=lambda verdict: None,
            hang=SimpleNamespace(
                watch=lambda processes: self.watched.append([process.title for process in processes]),
                note_end=lambda title, ended: None,
            ),
            on_slow=lambda losses, goodput: None,
            slow=SimpleNamespace(watch=lambda processes: None),
            limits=WorkerRange(least=1, most=1),
            budget=RestartBudget(None, 1),
            patience_s=2.0,
            publish=lambda pids, status: None,
        )
        for pid, process in enumerate(self.layout.local):
            self._alive[process.id] = process
            self._on_spawned(process.id, pid)

    def enter(self, phase: HandOverPhase) -> None:
        FakeHandOver.last.phase = phase
        self._server_commands.poll()


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attempt]:
    monkeypatch.setattr(hand_over, "HandOver", FakeHandOver)
    job = Job(tmp_path)
    attempt = Attempt(job)
    yield attempt
    attempt._server_commands.stop()
    job.close()


def test_no_hang_is_looked_for_while_the_servers_change(attempt: Attempt) -> None:
    everyone = ["server 0", "server 1", "rank 0"]
    assert attempt.watched == [everyone]
    attempt._answer({"servers": "scale", "count": 3})
    attempt.enter(HandOverPhase.LOAD)
    for rank in range(3):
        attempt._on_spawned(f"server.{rank}.1", 10 + rank)
    assert not any(attempt.watched[1:])
    FakeHandOver.last.give_up("no more")
    for rank in range(3):
        attempt._on_exit(f"server.{rank}.1", -9, 0.0)
    while attempt._server_commands.busy:
        attempt._server_commands.poll()
    assert attempt.watched[-1] == everyone


def test_servers_whose_pids_are_not_known_yet_may_have_their_tables_already(attempt: Attempt) -> None:
    attempt._answer({"servers": "scale", "count": 3})
    attempt.enter(HandOverPhase.LOAD)
    attempt._on_spawned("server.0.1", 10)
    attempt.enter(HandOverPhase.READY)
    assert FakeHandOver.last.is_committed
    attempt._on_spawned("server.1.1", 11)
    assert attempt.rows[-1] == [0, 1, 2]
    attempt._on_spawned("server.2.1", 12)
    assert attempt.rows[-1] == [10, 11, 12, 2]


def test_workers_are_not_asked_to_leave_while_their_last_words_are_held_back(attempt: Attempt) -> None:
    attempt._leave_by[0] = 1e9
    with pytest.raises(LaunchError, match="Workers were asked to leave: 0"):
        attempt._answer({"servers": "scale", "count": 3})
    attempt._leave_by.clear()
    attempt._answer({"servers": "scale", "count": 3})
    with pytest.raises(LaunchError, match="The number of servers is being changed"):
        attempt._answer({"scale": 1})


def test_a_worker_that_servers_wait_for_is_signed_off_at_those_the_job_goes_on_with(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed_off: list[int] = []
    monkeypatch.setattr(Attempt, "_sign_off", lambda attempt, worker: signed_off.append(worker))
    monkeypatch.setattr(FrozenWorkers, "find_awaited", lambda frozen, now: {0})
    attempt.pool.running.clear()
    attempt._answer({"servers": "scale", "count": 3})
    attempt._find_missed(0.0)
    assert signed_off == []
    FakeHandOver.last.give_up("no more")
    while attempt._server_commands.busy:
        attempt._server_commands.poll()
    attempt._find_missed(0.0)
    assert signed_off == [0]
