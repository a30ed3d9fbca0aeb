"""The page on jobs names every field of a job file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from phalanx.jobs.spec import training_job as spec
from phalanx.jobs.spec.file import read

PAGE = (Path(__file__).parents[2] / "docs" / "jobs.md").read_text()
SECTION = PAGE.partition("## The job spec")[2].partition("\n## ")[0]
WORDS = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", SECTION, flags=re.DOTALL)))))


@pytest.mark.parametrize(
    "model",
    [spec.TrainingJob, spec.Resources, spec.ServerRole, spec.Retries, spec.Checkpoint, spec.Slurm, spec.Kubernetes],
)
def test_every_field_is_on_the_page(model: type[spec.TrainingJob]) -> None:
    assert set(model.model_fields) - WORDS == set()


def test_the_job_on_the_page_is_one() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", SECTION, re.DOTALL)
    assert read(text).resources.nodes == 2
