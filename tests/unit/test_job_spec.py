"""What a job may say, and the amounts in it."""

import pytest
from pydantic import ValidationError

from phalanx.errors import SpecError
from phalanx.jobs.models import JobState, may_follow
from phalanx.jobs.spec.file import validate
from phalanx.jobs.spec.quantities import to_bytes, to_seconds
from phalanx.jobs.spec.training_job import TrainingJob


def test_amounts_are_read_as_people_write_them():
    assert to_bytes("8Gi") == 8 * 2**30
    assert to_bytes("500M") == 500_000_000
    assert to_bytes(1024) == 1024
    assert to_seconds("1h30m") == 5400
    assert to_seconds(90) == 90
    for said in ("8 gigs", "-1Gi", "", "0"):
        with pytest.raises(ValueError, match="no amount of memory"):
            to_bytes(said)
    for said in ("soon", "1h later", "", "0s"):
        with pytest.raises(ValueError, match="no length of time"):
            to_seconds(said)


def test_a_job_keeps_what_it_says_through_json():
    job = TrainingJob(
        name="mnist", command="python train.py", resources={"memory": "8Gi"}, max_runtime="2h", datasets=[{"name": "d"}]
    )
    assert TrainingJob.model_validate_json(job.model_dump_json()) == job


def test_unknown_fields_and_names_that_some_engine_refuses_are_errors():
    with pytest.raises(ValidationError, match="commnd"):
        TrainingJob(name="a", command="python t.py", commnd="x")
    for name in ("A", "a_b", "-a", "a-", "x" * 41, "../up"):
        with pytest.raises(ValidationError, match="name"):
            TrainingJob(name=name, command="python t.py")


def test_nothing_follows_an_end():
    for state in JobState:
        assert state.is_terminal == (not any(may_follow(state, after) for after in JobState))


@pytest.mark.parametrize(
    "said",
    [
        {"resources": {"nodes": 10**6}},
        {"resources": {"procs_per_node": 10**6}},
        {"resources": {"cpu": float("inf")}},
        {"resources": {"cpu": 1e308}},
        {"resources": {"memory": 10**400}},
        {"max_runtime": "9" * 400},
        {"datasets": [f"d{number}" for number in range(101)]},
        {"env": {"A": "zero\0byte"}},
        {"env": {"A": "half a letter \ud800"}},
        {"command": "python train.py \0"},
        {"command": "python train.py \ud800"},
        {"code": {"path": "\ud800"}},
        {"code": {"path": "a" * 256}},
        {"checkpoint": {"dir": "/" + "a/" * 2000}},
        {"slurm": {"partition": "gpu\ntouch /tmp/there"}},
        {"slurm": {"options": ["--comment=a\ntouch /tmp/there"]}},
        {"kubernetes": {"image": "a\nb"}},
    ],
    ids=lambda said: str(said)[:40].encode("ascii", "replace").decode(),
)
def test_what_no_machine_could_take_is_refused_in_one_sentence(said):
    with pytest.raises(SpecError) as refused:
        validate(TrainingJob, {"name": "a", "command": "python t.py"} | said)
    assert len(str(refused.value)) < 600
