"""Why an attempt failed, and whether it is tried again."""

from __future__ import annotations

import pytest

from phalanx.jobs.attempt.failures import failure_of, hang_failure, lost_node_failure, oom_failure, should_retry
from phalanx.jobs.attempt.files import ExitRecord
from phalanx.jobs.backend import Phase, Status
from phalanx.jobs.models import Attempt, Cause, Failure, JobState
from phalanx.jobs.spec.training_job import Retries, TrainingJob

FAILED = Status(Phase.FAILED)


def ended(
    code: int = 1, detail: str = "", cause: Cause = Cause.USER_CODE, rank: int | None = 3, at: float = 0.0
) -> ExitRecord:
    return ExitRecord("failed", cause, f"rank {rank} ended", rank, code, detail, ended=at)


def of(end: ExitRecord, status: Status = FAILED) -> Failure:
    failure = failure_of({0: end}, status)
    assert failure is not None
    return failure


def test_an_error_of_the_script_names_rank_code_and_traceback() -> None:
    failure = of(ended(1, "Traceback\nValueError: no"))
    assert failure == Failure(Cause.USER_CODE, "rank 3 ended", 0, 3, 1, "Traceback\nValueError: no")


@pytest.mark.parametrize(
    ("said", "word"),
    [
        ("MemoryError", "MemoryError"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "OutOfMemoryError"),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried", "can't allocate memory"),
    ],
)
def test_errors_that_say_so_are_out_of_memory(said: str, word: str) -> None:
    failure = of(ended(1, f"Traceback (most recent call last):\n  ...\n{said}"))
    assert failure.cause is Cause.OOM
    assert failure.message == f"rank 3 ended: out of memory ({word})"


def test_a_word_about_memory_far_above_the_end_says_nothing() -> None:
    assert of(ended(1, "MemoryError\n" + "line\n" * 20 + "ValueError: no")).cause is Cause.USER_CODE


@pytest.mark.parametrize("code", [-9, 137])
def test_a_killed_rank_ran_out_of_memory_only_if_the_kernel_says_so(code: int) -> None:
    assert of(ended(code)).cause is Cause.PREEMPTED
    failure = of(ended(code), Status(Phase.FAILED, failure=oom_failure(0, 1)))
    assert failure.cause is Cause.OOM
    assert failure.rank == 3
    assert "the kernel killed a process of this machine because memory ran out" in failure.message


@pytest.mark.parametrize("code", [-15, 143])
def test_a_rank_asked_to_end_from_outside_was_preempted(code: int) -> None:
    assert of(ended(code)).cause is Cause.PREEMPTED


def test_the_node_that_failed_is_named_before_those_that_lost_it() -> None:
    lost = ended(1, cause=Cause.NODE_FAILURE, rank=None, at=1.0)
    failure = failure_of({0: lost, 1: ended(7, at=2.0), 2: ExitRecord("stopped", message="ended with node 1")}, FAILED)
    assert failure is not None
    assert (failure.node, failure.exit_code, failure.cause) == (1, 7, Cause.USER_CODE)


def test_a_node_without_a_record_is_a_lost_node() -> None:
    assert failure_of({0: ExitRecord("stopped", message="asked to end by SIGTERM"), 1: None}, FAILED) is not None
    failure = failure_of({0: None}, Status(Phase.GONE, "the job is unknown"))
    assert failure == Failure(Cause.NODE_FAILURE, "node 0 was lost: the job is unknown, and it left no exit record", 0)
    assert failure_of(
        {0: None}, Status(Phase.FAILED, failure=lost_node_failure(0, "its process is gone"))
    ) == lost_node_failure(0, "its process is gone")


def test_a_node_that_somebody_else_stopped_was_preempted() -> None:
    failure = failure_of({0: ExitRecord("stopped", message="asked to end by SIGTERM")}, FAILED)
    assert failure == Failure(Cause.PREEMPTED, "node 0 was asked to end by SIGTERM, and not by us", 0)


def test_all_nodes_that_succeeded_are_a_success_whatever_the_backend_says() -> None:
    good = ExitRecord("succeeded", exit_code=0)
    assert failure_of({0: good, 1: good}, Status(Phase.GONE)) is None
    assert failure_of({0: None}, Status(Phase.SUCCEEDED)) is None
    assert failure_of({0: good, 1: None}, Status(Phase.SUCCEEDED)) is not None


def test_the_budget_counts_every_attempt_after_the_first() -> None:
    spec = TrainingJob(name="n", command="c", retries=Retries(max=2))
    attempts = [Attempt("n", number, JobState.FAILED) for number in (1, 2, 3)]
    assert [should_retry(spec, attempts[:count], hang_failure(60)) for count in (1, 2, 3)] == [True, True, False]
    assert not should_retry(spec, attempts[:1], Failure(Cause.USER_CODE, "no"))


def test_a_hang_names_the_rank_that_fell_silent_well_before_the_others() -> None:
    found = hang_failure(60, {"0": 100.0, "1": 70.0, "2": 101.0})
    assert found.message.startswith("rank 1 fell silent first, 30 s before the others; no rank wrote a line")
    assert found.rank == 1
    for signs in ({}, {"0": 1.0}, {"0": 100.0, "1": 99.5}):
        assert hang_failure(60, signs).rank is None
        assert hang_failure(60, signs).message.startswith("no rank wrote a line")
