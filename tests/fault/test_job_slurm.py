"""A job on two hosts under a real Slurm, one of which is lost while it trains."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phalanx.jobs.backends.slurm.backend import Slurm
from phalanx.jobs.control.controller import JobController
from phalanx.jobs.models import Actor, Cause, JobState
from phalanx.jobs.paths import attempt_folder
from phalanx.jobs.scheduling.queue import Amount
from phalanx.jobs.service.service import JobService
from phalanx.jobs.spec.code_and_data import Dataset
from phalanx.jobs.spec.training_job import TrainingJob
from phalanx.jobs.store import JobDatabase
from slurm_cluster import SlurmCluster, require_slurm

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(240)]

TRAIN = """
import os, time
from pathlib import Path
import torch
import torch.distributed as dist

def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    assert (Path(os.environ["PHALANX_DATASET_ROWS"]) / "rows.txt").read_text() == "1 2 3"
    kept = Path(os.environ["PHALANX_CHECKPOINT_DIR"]) / "step"
    first = int(kept.read_text()) if kept.exists() else 0
    print("BEGINS", first, os.uname().nodename, flush=True)
    for step in range(first + 1, first + 4 if first else 100000):
        dist.all_reduce(torch.ones(1))
        if rank == 0:
            kept.with_name("partial").write_text(str(step))
            kept.with_name("partial").rename(kept)
        time.sleep(0.02)
    print("ENDS", flush=True)
    dist.destroy_process_group()

main()
"""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    require_slurm(two_hosts=True)
    with tempfile.TemporaryDirectory(prefix="px-slurm-", dir="/tmp") as folder:
        running = SlurmCluster(Path(folder), two_hosts=True)
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        try:
            yield running
        finally:
            running.stop()


def test_a_job_that_loses_a_host_is_started_again_and_goes_on_from_its_checkpoint(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    repository = _repository(tmp_path / "code")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "rows.txt").write_text("1 2 3")
    home = tmp_path / "home"
    with JobDatabase(None, home) as store:
        engines = {"slurm": Slurm()}
        service = JobService(store, engines, Actor("me", owner=True), wake=lambda home: None)
        service.put_dataset("default", Dataset(name="rows", kind="local", uri=str(tmp_path / "rows")))
        said = {
            "name": "lasting",
            "command": "python train.py",
            "code": {"git": str(repository)},
            "datasets": [{"name": "rows"}],
            "resources": {"nodes": 2},
            "backend": "slurm",
            "retries": {"max": 1},
        }
        job = service.submit(TrainingJob.model_validate(said)).id
        controller = JobController(store, engines, home, machine=Amount(0, 0, 0))
        first, second = (attempt_folder(home, job, number) for number in (1, 2))
        step = first.parent / "checkpoints" / "step"

        def until(condition: Callable[[], bool], timeout_s: float = 90.0) -> None:
            deadline = time.monotonic() + timeout_s
            while not condition():
                found = store.jobs.get(job)
                on_time = not found.state.is_terminal and time.monotonic() < deadline
                assert on_time, (found, _said(first), _said(second))
                time.sleep(min(0.2, controller.step()))

        until(lambda: step.exists() and all("BEGINS" in _log(first, rank) for rank in range(2)))
        assert {_begins(first, rank)[1] for rank in range(2)} == {"node-a", "node-b"}
        cluster.kill_node("node-b")
        until(lambda: store.jobs.get(job).attempt == 2)
        failure = store.jobs.attempts(job)[0].failure
        assert failure is not None
        assert failure.cause is Cause.NODE_FAILURE
        until(lambda: bool(store.jobs.get(job).reason) and store.jobs.get(job).state is not JobState.RUNNING)
        reached = int(step.read_text())
        cluster.start_node("node-b")
        deadline = time.monotonic() + 90
        while not store.jobs.get(job).state.is_terminal:
            assert time.monotonic() < deadline, (store.jobs.get(job), _said(second))
            time.sleep(min(0.2, controller.step()))
        assert store.jobs.get(job).state is JobState.SUCCEEDED, (store.jobs.get(job), _said(second))
        assert _begins(second, 0)[0] == str(reached)
        assert "ENDS" in _log(second, 1)


def _repository(folder: Path) -> Path:
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    git = ("git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@t")
    for words in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "train")):
        subprocess.run([*git, *words], check=True)
    return folder


def _log(folder: Path, rank: int) -> str:
    path = folder / "logs" / f"workerlog.{rank}"
    return path.read_text() if path.exists() else ""


def _begins(folder: Path, rank: int) -> list[str]:
    """From which step a rank trains, and on which host."""
    return _log(folder, rank).split("BEGINS ")[1].split()[:2]


def _said(folder: Path) -> str:
    """All that an attempt wrote, for a test that fails."""
    found = [*sorted(folder.glob("logs/*log*")), *sorted(folder.glob("node-*"))]
    return "\n".join(f"{path.name}: {path.read_text()[-3000:]}" for path in found if path.is_file())
