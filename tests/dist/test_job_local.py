"""Attempts on this machine, as real processes; their nodes are a shell script that starts in milliseconds."""

from __future__ import annotations

import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import job_stand_in
from launching import wait_until
from phalanx.errors import BackendError, SpecError
from phalanx.jobs.attempt import files as attempt_files
from phalanx.jobs.backend import Phase, Submission
from phalanx.jobs.backends import local
from phalanx.jobs.backends.local import Local
from phalanx.jobs.models import Cause
from phalanx.jobs.scheduling.queue import Amount

pytestmark = pytest.mark.dist

MACHINE = Amount(4000, 8192, 0)


@pytest.fixture
def backend(tmp_path: Path) -> Local:
    return Local(MACHINE, gpus=(), node=job_stand_in.node(tmp_path))


@pytest.fixture
def submit(backend: Local, tmp_path: Path) -> Iterator[Callable[..., Submission]]:
    """Submit attempts of a command, and see that nothing is left of them."""
    made: list[Submission] = []

    def one(command: str, **more: Any) -> Submission:
        made.append(job_stand_in.submission(tmp_path, command, **more))
        backend.submit(made[-1])
        return made[-1]

    yield one
    for submission in made:
        backend.cleanup(submission, "")
        assert local._marked_pids(submission.folder) == []


def ran(submission: Submission, node: int = 0) -> int:
    path = submission.folder / f"ran-{node}"
    return path.read_text().count("started") if path.exists() else 0


def test_an_attempt_runs_to_its_end_once(backend: Local, submit: Callable[..., Submission]) -> None:
    done = submit("true")
    wait_until(lambda: backend.status(done, "").phase is Phase.SUCCEEDED)
    backend.submit(done)
    Local(MACHINE, gpus=(), node=backend._node).submit(done)
    assert ran(done) == 1
    assert (done.folder / "logs" / "node-0.log").read_text() == "text of node 0\n"


def test_another_controller_finds_what_runs_and_starts_nothing_twice(
    backend: Local, submit: Callable[..., Submission]
) -> None:
    runs = submit("nap 60", resources={"nodes": 2})
    wait_until(lambda: ran(runs, 0) + ran(runs, 1) == 2)
    (runs.folder / "node-1.pid").unlink()  # As if the controller had died before it noted the pid.
    other = Local(MACHINE, gpus=(), node=backend._node)
    assert other.submit(runs) == backend.submit(runs)
    assert (ran(runs, 0), ran(runs, 1)) == (1, 1)
    wait_until(lambda: other.status(runs, "").phase is Phase.RUNNING)
    other.stop(runs, "", 5)
    backend.stop(runs, "", 5)
    wait_until(lambda: other.status(runs, "").phase is Phase.FAILED)
    ends = [attempt_files.read_exit_record(runs.folder, node) for node in (0, 1)]
    assert [end.outcome for end in ends if end] == ["stopped", "stopped"]


def test_a_killed_node_is_lost_and_what_it_left_is_killed(backend: Local, submit: Callable[..., Submission]) -> None:
    runs = submit("hold", resources={"nodes": 2})
    wait_until(lambda: ran(runs, 0) + ran(runs, 1) == 2)
    pid = local._read_pid_note(runs.folder, 1)["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: backend.status(runs, "").failure is not None)
    status = backend.status(runs, "")
    assert status.phase is Phase.RUNNING
    assert status.failure is not None
    assert (status.failure.cause, status.failure.node) == (Cause.NODE_FAILURE, 1)
    backend.cleanup(runs, "")
    assert backend.status(runs, "").phase is Phase.FAILED


def test_a_node_that_the_kernel_killed_for_memory_says_so(
    backend: Local, submit: Callable[..., Submission], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = submit("hold")
    wait_until(lambda: ran(runs) == 1)
    before = local._oom_kills()
    monkeypatch.setattr(local, "_oom_kills", lambda: before + 1)
    os.kill(local._read_pid_note(runs.folder, 0)["pid"], signal.SIGKILL)
    wait_until(lambda: backend.status(runs, "").phase is Phase.FAILED)
    failure = backend.status(runs, "").failure
    assert failure is not None
    assert failure.cause is Cause.OOM


def test_a_node_that_does_not_end_is_killed_after_its_grace(
    backend: Local, submit: Callable[..., Submission], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = submit("sulk")
    wait_until((runs.folder / "sulks-0").exists)
    backend.stop(runs, "", 0.05)
    assert backend.status(runs, "").phase is Phase.RUNNING
    monkeypatch.setattr(local, "_LATE_S", 0.0)
    time.sleep(0.1)
    backend.stop(runs, "", 0.05)
    assert backend.status(runs, "").phase is Phase.FAILED


def test_secrets_pass_through_no_argument_and_no_environment(backend: Local, submit: Callable[..., Submission]) -> None:
    runs = submit("nap 60", secrets={"TOKEN": "s3cret-value"})
    wait_until(lambda: (runs.folder / "secrets-0").exists() and "s3cret" in (runs.folder / "secrets-0").read_text())
    for pid in local._marked_pids(runs.folder):
        assert b"s3cret-value" not in local._read(pid, "cmdline") + local._read(pid, "environ")
    assert "s3cret-value" not in (runs.folder / "attempt.json").read_text()
    assert stat.S_IMODE((runs.folder / "node-0.lock").stat().st_mode) == 0o600


def test_what_was_never_started_is_gone(backend: Local, tmp_path: Path) -> None:
    never = job_stand_in.submission(tmp_path, "true")
    assert backend.status(never, "").phase is Phase.GONE
    backend.stop(never, "", 1)
    backend.cleanup(never, "")


def test_cards_belong_to_one_node_at_a_time(tmp_path: Path) -> None:
    backend = Local(Amount(4000, 8192, 2), gpus=("0", "1"), node=job_stand_in.node(tmp_path))
    one, two, three = (job_stand_in.submission(tmp_path, "cards", attempt=i, resources={"gpu": 1}) for i in (1, 2, 3))
    try:
        backend.submit(one)
        backend.submit(two)
        with pytest.raises(BackendError, match="needs 1 gpu, and 0 are free"):
            backend.submit(three)
        logs = [each.folder / "logs" / "node-0.log" for each in (one, two)]
        wait_until(lambda: all("cards" in log.read_text() for log in logs))
        assert sorted(log.read_text().split("cards ")[1] for log in logs) == ["0\n", "1\n"]
        backend.cleanup(one, "")
        backend.submit(three)
        assert backend.status(three, "").phase is not Phase.GONE
    finally:
        for each in (one, two, three):
            backend.cleanup(each, "")


def test_what_never_fits_is_refused(backend: Local, tmp_path: Path) -> None:
    large = job_stand_in.submission(tmp_path, "python t.py", resources={"cpu": 9, "memory": "1Gi"}).spec
    with pytest.raises(SpecError, match="asks for 9 cpu, 1 GiB of memory on this machine, which has 4 cpu"):
        backend.check(large)
    many = job_stand_in.submission(tmp_path, "python t.py", resources={"cpu": 0.001, "nodes": 65}).spec
    with pytest.raises(SpecError, match="asks for 65 nodes, and this machine plays 64 at most"):
        backend.check(many)


def test_render_shows_a_command_a_node(backend: Local, tmp_path: Path) -> None:
    shown = backend.render(job_stand_in.submission(tmp_path, "true", resources={"nodes": 2}))
    assert [line.split()[-2:] for line in shown.splitlines()] == [["--node", "0"], ["--node", "1"]]
