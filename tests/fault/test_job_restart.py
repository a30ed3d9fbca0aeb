"""A job as a user has it: submitted, hit by kills of a rank and of the controller, started again, finished."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path

import pytest

from launching import wait_until
from phalanx.files import liveness_lock
from phalanx.jobs.backend_registry import Backends
from phalanx.jobs.connect import open_jobs
from phalanx.jobs.control.controller import ensure_controller
from phalanx.jobs.models import Actor, Cause, JobState
from phalanx.jobs.service.service import JobService
from phalanx.jobs.spec.training_job import TrainingJob
from phalanx.jobs.store import JobDatabase

pytestmark = pytest.mark.fault

SCRIPT = """
import os, time
from pathlib import Path

folder, rank = Path(os.environ["PHALANX_CHECKPOINT_DIR"]), os.environ["RANK"]
saved = folder / f"step-{rank}"
begun = int(saved.read_text()) if saved.exists() else 0
print("begins at", begun, "of world", os.environ["WORLD_SIZE"], flush=True)
(folder / f"pid-{rank}").write_text(str(os.getpid()))
# The first attempt continues until somebody ends it.
for step in range(begun + 1, begun + 4 if begun else 10**6):
    time.sleep(0.05)
    saved.with_suffix(".new").write_text(str(step))
    saved.with_suffix(".new").rename(saved)
print("done", flush=True)
"""


def controllers(home: Path) -> list[int]:
    """Pids of the controllers of `home` in the background."""
    words = [b"phalanx.jobs.control.controller", str(home).encode()]

    def is_one(pid: str) -> bool:
        try:
            found = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:  # It has ended.
            return False
        return all(word in found for word in words)

    return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and is_one(pid)]


def _is_free(lock: Path) -> bool:
    with liveness_lock(lock) as taken:
        return taken is not None


def test_a_job_outlives_its_controller_and_a_killed_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, code = tmp_path / "home", tmp_path / "code"
    code.mkdir()
    (code / "train.py").write_text(SCRIPT)
    monkeypatch.delenv("PHALANX_STORE", raising=False)
    spec = TrainingJob.model_validate(
        {
            "name": "count",
            "command": "python train.py",
            "code": {"path": str(code)},
            "resources": {"procs_per_node": 2, "cpu": 0.5},
            "retries": {"max": 1},
        }
    )
    with JobDatabase(None, home) as store:
        jobs = JobService(store, Backends(), Actor("ann", owner=True), wake=lambda _: None)
        job = jobs.submit(spec, base=code).id
        racing = [threading.Thread(target=ensure_controller, args=(home,)) for _ in range(4)]
        for one in racing:
            one.start()
        for one in racing:
            one.join()
        assert len(controllers(home)) == 1
        saved = home / "jobs" / job / "checkpoints"
        wait_until(lambda: (saved / "step-1").exists() and int((saved / "step-1").read_text()) > 3)
        os.kill(controllers(home)[0], signal.SIGKILL)
        wait_until(lambda: _is_free(home / "keeper.lock"))
        os.kill(int((saved / "pid-1").read_text()), signal.SIGKILL)
        monkeypatch.setenv("PHALANX_HOME", str(home))
        with open_jobs() as looking:  # any command finds a controller for jobs that have none
            looking.jobs()
        wait_until(lambda: jobs.job(job).state.is_terminal)
        assert jobs.job(job).state is JobState.SUCCEEDED, (jobs.job(job), (home / "controller.log").read_text())
        first, second = jobs.attempts(job)
        assert first.failure is not None
        assert (first.failure.cause, first.failure.rank, first.failure.exit_code) == (Cause.PREEMPTED, 1, -9)
        assert second.state is JobState.SUCCEEDED
        assert "begins at 0 of world 2" in jobs.log(job, rank="1", attempt=1).text
        text = jobs.log(job, rank="1").text
        assert "done" in text
        assert int(text.split("begins at ")[1].split()[0]) > 3
        assert [event.data["to"] for event in jobs.events(job) if event.kind == "state"] == [
            *("queued", "preparing", "running", "restarting"),
            *("preparing", "running", "succeeded"),
        ]
        wait_until(lambda: not controllers(home))


def test_a_controller_whose_home_is_removed_ends_and_starts_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PHALANX_STORE", raising=False)
    home = tmp_path / "home"
    with JobDatabase(None, home) as store:
        # More than this machine could ever give: the job waits, and its controller with it.
        spec = TrainingJob.model_validate({"name": "waits", "command": "true", "resources": {"cpu": 100000}})
        store.jobs.create(spec, owner="ann")
        ensure_controller(home)
        wait_until(lambda: bool(store.jobs.find()[0].reason))
    shutil.rmtree(home)
    wait_until(lambda: not controllers(home))
    assert not home.exists()
