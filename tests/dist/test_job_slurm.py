"""Attempts on a real Slurm of two nodes: rendered, submitted, watched, stopped."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from job_nodes import DDP, SERVERS, log, submission
from phalanx.errors import BackendError, SpecError
from phalanx.jobs.attempt import files as attempt_files
from phalanx.jobs.backend import Phase, Status, Submission
from phalanx.jobs.backends.slurm.backend import Slurm
from phalanx.jobs.spec.training_job import TrainingJob
from slurm_cluster import SlurmCluster, require_slurm

pytestmark = pytest.mark.dist

WAITS = """
import signal, sys, time
def save(*_):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("up", flush=True)
time.sleep(60)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    require_slurm()
    # A socket's name is short, and the test's own folders are not.
    with tempfile.TemporaryDirectory(prefix="px-slurm-", dir="/tmp") as folder:
        running = SlurmCluster(Path(folder))
        try:
            yield running
        finally:
            running.stop()


@pytest.fixture
def slurm(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    return Slurm()


def wait(slurm: Slurm, made: Submission, handle: str, *phases: Phase, timeout_s: float = 60.0) -> Status:
    """Wait until an attempt is in one of some phases."""
    deadline = time.monotonic() + timeout_s
    while (status := slurm.status(made, handle)).phase not in phases:
        if time.monotonic() > deadline or status.phase in (Phase.SUCCEEDED, Phase.FAILED, Phase.GONE):
            logs = [
                f"{path.name}: {path.read_text()}" for path in sorted(made.folder.glob("logs/*log*")) if path.is_file()
            ]
            raise AssertionError("\n".join([str(status), *logs]))
        time.sleep(0.2)
    return status


def test_a_job_on_both_nodes_trains_and_another_waits_for_them_with_a_reason(slurm: Slurm, tmp_path: Path) -> None:
    all_cores = {"resources": {"nodes": 2, "cpu": 4}, "backend": "slurm"}
    trains = submission(tmp_path, DDP, job="trains", values={"TOKEN": "hush-hush"}, secrets=["TOKEN"], **all_cores)
    waits = submission(tmp_path, DDP, job="waits", number=2, **all_cores)
    first, second = slurm.submit(trains), slurm.submit(waits)
    # Whoever died between handing it over and noting its id finds it again.
    assert Slurm().submit(trains) == first
    status = wait(slurm, trains, first, Phase.PREPARING, Phase.RUNNING)
    assert status.nodes == ("node-a", "node-b")
    deadline = time.monotonic() + 30
    while "Slurm: None" in (queued := slurm.status(waits, second)).reason:  # the scheduler has not looked at it yet
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert queued.phase is Phase.QUEUED
    # Which of the two depends on whether the scheduler has looked at it already.
    assert queued.reason in (
        "waits until enough nodes are free (Slurm: Resources)",
        "other jobs are before it (Slurm: Priority)",
    )
    told = subprocess.run(["scontrol", "show", "job", first], capture_output=True, text=True, check=True).stdout
    assert f"phalanx job {trains.job}, attempt 1" in told
    slurm.stop(waits, second, 1.0)
    slurm.stop(waits, second, 1.0)
    assert wait_for(lambda: slurm.status(waits, second), Phase.FAILED).reason == "CANCELLED"

    wait(slurm, trains, first, Phase.SUCCEEDED)
    assert {log(trains, f"workerlog.{rank}").split("RESULT ")[1] for rank in range(2)} == {"0 2 2\n", "1 2 2\n"}
    assert not list(trains.folder.glob("secrets-*"))
    assert "hush-hush" not in told + "".join(p.read_text() for p in trains.folder.rglob("*") if p.is_file())
    slurm.cleanup(trains, first)
    # Slurm forgets a job minutes after its end; its nodes wrote how it ended.
    assert slurm.submit(trains) == first
    slurm.cleanup(waits, second)
    assert not list(waits.folder.glob("secrets-*"))


def test_servers_run_beside_workers_on_both_nodes(slurm: Slurm, tmp_path: Path) -> None:
    made = submission(tmp_path, SERVERS, job="servers", resources={"nodes": 2}, servers={"count": 2}, backend="slurm")
    handle = slurm.submit(made)
    wait(slurm, made, handle, Phase.SUCCEEDED)
    assert {log(made, f"workerlog.{rank}").split("RESULT ")[1].split("\n")[0] for rank in range(2)} == {"0 2", "1 2"}
    assert "all workers have left" in log(made, "serverlog.1")


def test_a_job_is_asked_to_end_and_saves(slurm: Slurm, tmp_path: Path) -> None:
    made = submission(tmp_path, WAITS, job="saves", launch="env", resources={"nodes": 2}, backend="slurm")
    handle = slurm.submit(made)
    deadline = time.monotonic() + 30
    while not all(
        (made.folder / f"logs/workerlog.{rank}").exists() and "up" in log(made, f"workerlog.{rank}")
        for rank in range(2)
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert slurm.status(made, handle) == Status(Phase.RUNNING, "running", ("node-a", "node-b"))
    for _ in range(2):
        slurm.stop(made, handle, 30.0)
    wait_for(lambda: slurm.status(made, handle), Phase.FAILED)
    for node in range(2):
        end = attempt_files.read_exit_record(made.folder, node)
        assert end is not None
        assert (end.outcome, end.exit_code) == ("stopped", 0)
        assert "saved" in log(made, f"workerlog.{node}")


def test_what_fits_nowhere_is_refused_before_it_is_handed_over(slurm: Slurm) -> None:
    def checked(**said: object) -> None:
        slurm.check(TrainingJob.model_validate({"name": "j", "command": "python train.py", "backend": "slurm", **said}))

    checked(resources={"nodes": 2, "cpu": 4, "memory": "3G"})
    with pytest.raises(SpecError, match=r"slurm\.partition 'debgu' does not exist; .* Did you mean 'debug'\?"):
        checked(slurm={"partition": "debgu"})
    with pytest.raises(SpecError, match="2 nodes with 1 cpu each, but partition 'short' has 1 nodes, 1 of them"):
        checked(slurm={"partition": "short"}, resources={"nodes": 2, "cpu": 1})
    with pytest.raises(SpecError, match=r"ask for 1 nodes with 5 cpu each, .*; node-. has 4 cpu, 3\.91Gi memory"):
        checked(resources={"cpu": 5})


def test_what_slurm_says_no_to_is_told_in_its_words(slurm: Slurm, tmp_path: Path) -> None:
    made = submission(tmp_path, DDP, job="refused", backend="slurm", slurm={"options": ["--no-such-option=1"]})
    with pytest.raises(BackendError, match=r"sbatch said: .*no-such-option"):
        slurm.submit(made)


def wait_for(status: Callable[[], Status], phase: Phase, timeout_s: float = 30.0) -> Status:
    """Wait for a phase that is an end."""
    deadline = time.monotonic() + timeout_s
    while (found := status()).phase is not phase:
        assert time.monotonic() < deadline, found
        time.sleep(0.2)
    return found
