"""The job files among the examples can be submitted as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from known_configs import Known
from phalanx.jobs.service.resolve import resolve
from phalanx.jobs.spec.file import read

JOBS = Path(__file__).parents[2] / "examples" / "jobs"


@pytest.mark.parametrize("name", ["mnist_ddp.yaml", "wide_and_deep.yaml"])
def test_a_job_of_the_examples_resolves(name: str, tmp_path: Path) -> None:
    job = resolve(read(JOBS / name), configs=Known(), home=tmp_path, base=JOBS)
    kept = tmp_path / "code" / str(job.code.digest)
    assert (kept / "train.py").exists()
    assert not list(kept.rglob("*cache*")), "what .gitignore leaves out is not copied"


def test_the_request_of_the_examples_is_a_job_of_two_pods() -> None:
    job = read(JOBS / "dlc_request.json", settings=["code.path=../mnist_ddp"])
    assert (job.launch, job.resources.nodes, job.command) == ("env", 2, "python train.py --epochs 3")


def test_every_job_file_is_tested_here() -> None:
    assert {path.name for path in JOBS.iterdir()} == {"mnist_ddp.yaml", "wide_and_deep.yaml", "dlc_request.json"}
