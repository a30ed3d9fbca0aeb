"""A slice of `make soak` with fixed seeds: a job of each kind, and what must hold after its faults.

`python -m benchmarks.soak --seed 1 --faults 200` draws many.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.soak import elastic, loaders, saves, servers
from benchmarks.soak.elastic import TrainingKind
from benchmarks.soak.launched import LaunchedJob, can_mount
from benchmarks.soak.result import SoakResult

pytestmark = pytest.mark.fault
needs_mounts = pytest.mark.skipif(not can_mount(), reason="needs root to mount")
UPDATES = 120


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs without faults are."""
    return tmp_path_factory.mktemp("reference")


def judge(result: SoakResult, *, least: int = 1) -> None:
    """Fail with the job's own words where something does not hold, or no fault came about."""
    found = f"{result.kind}, seed {result.seed}: {result.faults}\n{result.problems}"
    assert not result.problems, f"{found}\n{result.report}"
    assert len(result.faults) >= least, result.report


def test_ranks_that_are_lost_in_steps_and_saves(tmp_path: Path, reference: Path) -> None:
    judge(elastic.ranks_are_lost(tmp_path, 3, reference, count=3, updates=UPDATES))


@pytest.mark.parametrize(
    "kind",
    [TrainingKind(mirror=1), TrainingKind(adversaries=True), TrainingKind(adversaries=True, mirror=0)],
    ids=["mirrors", "two models", "two models without mirrors"],
)
def test_ranks_that_are_lost_of_jobs_with_sharded_state_and_two_models(
    tmp_path: Path, reference: Path, kind: TrainingKind
) -> None:
    judge(elastic.ranks_are_lost(tmp_path, 3, reference, kind=kind, count=3, updates=UPDATES))


def test_a_restart_is_judged_by_the_ranks_that_were_lost_before_it(tmp_path: Path) -> None:
    path, why = tmp_path / "log" / "events.launcher.0.jsonl", "lost together with their mirrors"
    path.parent.mkdir()

    def problems(first: dict[str, float], mirror: int | None) -> list[str]:
        events = [{"lost": ["n0.1"], "ranks": 3, "seconds": first}]
        events += [{"lost": ["n0.2"], "ranks": 2, "seconds": {}, "ended": why}]
        path.write_text("".join(json.dumps(event) + "\n" for event in events))
        return elastic.restart_problems(tmp_path, 1, mirror)

    assert problems({"n0.0": 0.1}, 1) == []
    assert problems({"n0.0": 0.1, "n0.2": 0.1, "n0.3": 0.1}, 1) == [
        f"the job began again after the loss of n0.2: {why}"
    ]
    assert problems({"n0.0": 0.1}, 0) == [f"the job began again after the loss of n0.1, n0.2: {why}"]
    assert elastic.restart_problems(tmp_path, 2, 1) == ["the job began again 2 times, and gave 1 reasons"]


def test_a_launcher_that_is_killed_and_its_job_resumed(tmp_path: Path, reference: Path) -> None:
    judge(elastic.launcher_is_killed(tmp_path, 2, reference, updates=UPDATES))


def test_servers_and_workers_that_are_lost(tmp_path: Path) -> None:
    judge(servers.processes_are_lost(tmp_path, 1, "sync", count=2, steps=80))


def test_servers_that_are_killed_with_most_rows_in_files(tmp_path: Path) -> None:
    judge(servers.processes_are_lost(tmp_path, 2, "async", count=3, steps=120, is_spilled=True), least=3)


@needs_mounts
def test_saves_on_a_full_disk_and_killed_ones(tmp_path: Path) -> None:
    judge(saves.saves_are_hit(tmp_path, 4, count=2, saves=30))


@needs_mounts
def test_a_loader_worker_that_is_killed_with_little_shared_memory(tmp_path: Path, reference: Path) -> None:
    judge(loaders.memory_is_small(tmp_path, 6, reference / "loaders"), least=2)


HOLDS = """
import multiprocessing, os, time
lock = multiprocessing.get_context("spawn").Lock()
assert os.listdir("/dev/shm")
open("up." + os.environ["RANK"], "w").close()
time.sleep(600)
"""


@needs_mounts
def test_semaphores_of_a_job_whose_launcher_is_killed_are_removed(tmp_path: Path) -> None:
    """A lock that a spawned process can use has a name there, which Python's resource tracker removes if it is let."""
    (tmp_path / "train.py").write_text(HOLDS)
    with LaunchedJob(tmp_path) as job:
        launcher = job.start("-n", 2, "train.py")
        assert job.wait_until(lambda: len(list(tmp_path.glob("up.*"))) == 2), job.report()
        launcher.kill()
        assert job.remaining() == [], job.report()


@needs_mounts
def test_what_a_job_leaves_is_seen(tmp_path: Path) -> None:
    """The judge itself: a file in /dev/shm and a process outlive the job."""
    (tmp_path / "train.py").write_text("open('/dev/shm/mine', 'w').write('x')\n")
    with LaunchedJob(tmp_path) as job:
        job.start("train.py", enter=("sh", "-c", '(sleep 600 &); exec "$@"', "sh"))
        assert job.wait(60) == [0]
        process, file = job.remaining()
        assert process.startswith("process ")
        assert file == "/dev/shm/mine"
