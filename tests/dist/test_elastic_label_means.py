"""Elastic jobs whose loss is a mean over labels have the bits of the undisturbed run."""

from __future__ import annotations

import pytest

from elastic_training import EPOCHS, GLOBAL, REPLICAS, SAMPLES, job, train
from ranks import run_ranks

pytestmark = pytest.mark.dist

UPDATES = EPOCHS * SAMPLES // GLOBAL
WEIGHTED = {"WEIGHTED": "1"}


@pytest.fixture(scope="module")
def undisturbed() -> str:
    """The weights of one process with as many replicas, which is not elastic."""
    ((weights, updates, _, _),) = run_ranks(train, 1, {}, env={"PHALANX_REPLICAS": str(REPLICAS), **WEIGHTED})
    assert updates == UPDATES
    ((others, _, _, _),) = run_ranks(train, 1, {}, env={"PHALANX_REPLICAS": str(REPLICAS)})
    assert others != weights
    return weights


def test_without_a_loss_an_elastic_job_trains_as_any_other(undisturbed: str) -> None:
    values = job({}, members=3, env=WEIGHTED).run()
    assert {value[:2] for value in values.values()} == {(undisturbed, UPDATES)}


@pytest.mark.parametrize("where", ["forward", "backward", "weigh", "weighed", "step", "commit", "committed", "after"])
def test_survivors_finish_the_step_of_a_killed_rank(undisturbed: str, where: str) -> None:
    values = job({"n0.1": (4, where)}, members=3, env=WEIGHTED).run()
    assert {value[:2] for value in values.values()} == {(undisturbed, UPDATES)}
    assert len(values) == 2


def test_two_ranks_lost_in_one_step(undisturbed: str) -> None:
    values = job({"n0.0": (5, "weigh"), "n0.3": (5, "backward")}, members=4, env=WEIGHTED).run()
    assert {value[:2] for value in values.values()} == {(undisturbed, UPDATES)}
    assert len(values) == 2


def test_a_member_that_gave_up_the_commit_has_the_update_that_the_others_made(undisturbed: str) -> None:
    values = job({"n0.0": (5, "give up"), "n0.2": (5, "committed")}, members=3, env=WEIGHTED).run()
    assert {value[:2] for value in values.values()} == {(undisturbed, UPDATES)}
    assert len(values) == 2


def test_a_joiner_takes_part_with_the_same_result(undisturbed: str) -> None:
    values = job({}, (2,), members=2, env=WEIGHTED).run()
    assert {value[:2] for value in values.values()} == {(undisturbed, UPDATES)}
    assert len(values) == 3
