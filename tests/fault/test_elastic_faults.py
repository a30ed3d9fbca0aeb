"""Random faults in elastic jobs: every sample is trained once, and the weights are those of the undisturbed run.

The seed is printed when a test fails, and PHALANX_TEST_SEED draws other faults. `python -m benchmarks.soak` draws many.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from benchmarks.elastic_faults import draw_faults
from benchmarks.elastic_jobs import Trained, read_lines, run_job
from benchmarks.soak.elastic import PATIENCE

pytestmark = pytest.mark.fault

SEED = int(os.environ.get("PHALANX_TEST_SEED", "1"))
JOBS, FAULTS = 2, 6
SCRIPT = ("--epochs", 20, "--samples", 240, "--pause", 0.003)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The same training without faults."""
    job = run_job(tmp_path_factory.mktemp("undisturbed") / "job", ranks="1:2", script=SCRIPT)
    assert job.code == 0, job.report()
    assert (job.updates, len(job.hashes)) == (200, 1)
    return job


@pytest.mark.parametrize("seed", range(SEED, SEED + JOBS))
def test_random_faults_change_neither_samples_nor_weights(undisturbed: Trained, tmp_path: Path, seed: int) -> None:
    faults = draw_faults(seed, FAULTS, ranks=4, first=5, every=15)
    flags = ("--max-restarts", "100")
    job = run_job(tmp_path / "job", faults=faults, launcher=flags, script=SCRIPT, env=PATIENCE)
    assert not job.problems(undisturbed), f"PHALANX_TEST_SEED={seed}\n{faults}\n{job.report()}"
    assert list((tmp_path / "job").glob("fault.*")), "no fault came about"


def test_nothing_is_left_of_a_job_whose_launcher_is_killed(tmp_path: Path) -> None:
    moment = random.Random(SEED).randrange(5, 50)

    def kill(launcher: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            written = [
                line["update"] for lines in read_lines(tmp_path / "job").values() for line in lines if "update" in line
            ]
            if max(written, default=-1) >= moment:
                break
            time.sleep(0.01)
        launcher.send_signal(signal.SIGKILL)

    job = run_job(tmp_path / "job", script=SCRIPT, act=kill)
    assert (job.code, job.remaining) == (-signal.SIGKILL, []), f"PHALANX_TEST_SEED={SEED}: update {moment}"
    assert moment < job.updates < 200
