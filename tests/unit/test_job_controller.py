"""The controller over a store in memory and an engine that does what it is told."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from job_memory_store import MemoryJobs, MemoryStore
from phalanx.errors import BackendError, SpecError
from phalanx.jobs import paths
from phalanx.jobs.attempt import files as attempt_files
from phalanx.jobs.attempt.files import ExitRecord
from phalanx.jobs.backend import Phase, Status, Submission
from phalanx.jobs.control.attempt_controller import SUBMIT_S
from phalanx.jobs.control.controller import LEASE_S, JobController
from phalanx.jobs.models import Cause, Failure, Job, JobState
from phalanx.jobs.scheduling.queue import Amount
from phalanx.jobs.spec.training_job import TrainingJob

LOST = Failure(Cause.NODE_FAILURE, "node 0 was lost", 0)
BUG = Failure(Cause.USER_CODE, "rank 0 ended with exit code 1", 0, 0, 1)
MACHINE = Amount(2000, 4096, 0)


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """An engine in memory: attempts run until they are told how to end."""

    name = "local"

    def __init__(self) -> None:
        self.runs: dict[tuple[str, int], Status] = {}
        self.calls: list[str] = []
        self.secrets: dict[str, str] = {}
        self.error: Exception | None = None
        self.begins = Status(Phase.RUNNING)

    def check(self, spec: TrainingJob) -> None: ...

    def render(self, submission: Submission, *, full: bool = False) -> str:
        return submission.job

    def submit(self, submission: Submission) -> str:
        self._meet("submit")
        key = (submission.job, submission.attempt)
        if key not in self.runs:
            others = [status.phase for (job, _), status in self.runs.items() if job == submission.job]
            assert Phase.RUNNING not in others, "two attempts at one job at a time"
            self.runs[key] = self.begins
            self.secrets = submission.secrets
        return f"{submission.job}-{submission.attempt}"

    def status(self, submission: Submission, handle: str) -> Status:
        self._meet("status")
        return self.runs.get((submission.job, submission.attempt), Status(Phase.GONE, "unknown"))

    def collect(self, submission: Submission, handle: str) -> None: ...

    def stop(self, submission: Submission, handle: str, grace_s: float) -> None:
        self._meet("stop")
        if (submission.job, submission.attempt) in self.runs:
            self.end(submission.job, Failure(Cause.PREEMPTED, "ended by us"), submission.attempt)

    def cleanup(self, submission: Submission, handle: str) -> None:
        self._meet("cleanup")

    def end(self, job: str, failure: Failure | None = None, attempt: int = 1) -> None:
        phase = Phase.SUCCEEDED if failure is None else Phase.FAILED
        self.runs[job, attempt] = Status(phase, failure=failure)

    def _meet(self, call: str) -> None:
        self.calls.append(call)
        if self.error is not None:
            raise self.error


class World:
    """A controller with everything around it."""

    def __init__(self, home: Path) -> None:
        self.home, self.clock, self.engine = home, Clock(), Engine()
        self.ledger = MemoryStore(self.clock)
        self.controller = self.another()

    def another(self, home: str = "") -> JobController:
        engines = {"local": self.engine, "slurm": self.engine}
        return JobController(self.ledger, engines, self.home / home, machine=MACHINE, clock=self.clock)

    def step(self, times: int = 1, seconds: float = 1.0) -> None:
        for _ in range(times):
            self.clock.now += seconds
            self.controller.step()

    def job(self, id: str = "a") -> Job:
        return self.ledger.jobs.rows[id]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_job_goes_from_the_queue_to_success(world: World) -> None:
    world.ledger.jobs.add("a")
    world.step()
    assert world.job().state is JobState.RUNNING
    assert world.ledger.jobs.tries["a"][0].handle == "a-1"
    world.engine.end("a")
    world.step()
    assert world.job().state is JobState.SUCCEEDED
    assert world.controller.step() == 1.0
    assert world.controller.is_idle


def test_jobs_wait_with_a_reason_that_is_written_when_it_changes(world: World) -> None:
    world.ledger.jobs.add("a", resources={"cpu": 2})
    world.ledger.jobs.add("b", resources={"cpu": 1})
    world.step(30)
    assert world.job("b").state is JobState.QUEUED
    assert world.job("b").reason == "needs 1 cpu, none is free; next in line"
    assert world.ledger.jobs.explained == 1
    world.engine.end("a")
    world.step()
    assert world.job("b").state is JobState.RUNNING
    assert world.job("b").reason == ""


def test_limits_of_queues_are_read_when_they_change(world: World, caplog: pytest.LogCaptureFixture) -> None:
    (world.home / "queues.yaml").write_text("team: {jobs: 1}\n")
    for id in "abc":
        world.ledger.jobs.add(id, queue="team", resources={"cpu": 0.5})
    world.step()
    assert [world.job(id).state for id in "abc"] == [JobState.RUNNING, JobState.QUEUED, JobState.QUEUED]
    assert world.job("b").reason == "the quota of queue team is used up"
    (world.home / "queues.yaml").write_text("team: {job: 1}\n")
    world.step(20)
    assert "queues.yaml is no list of limits" in caplog.text
    assert world.job("b").state is JobState.QUEUED
    (world.home / "queues.yaml").unlink()
    world.step(20)
    assert world.job("c").state is JobState.RUNNING


def test_engines_with_a_queue_of_their_own_get_every_job_and_give_the_reason(world: World) -> None:
    for id in "abc":
        world.ledger.jobs.add(id, backend="slurm", resources={"cpu": 64})
    world.step()
    assert [job.state for job in world.ledger.jobs.rows.values()] == [JobState.RUNNING] * 3
    world.ledger.jobs.add("d", backend="slurm")
    world.engine.begins = Status(Phase.QUEUED, "Resources")
    world.step(2, 5)
    assert (world.job("d").state, world.job("d").reason) == (JobState.QUEUED, "slurm: Resources")


def test_what_failed_is_started_again_within_its_budget_and_by_its_cause(world: World) -> None:
    world.ledger.jobs.add("a", retries={"max": 1})
    world.step()
    world.engine.end("a", LOST)
    world.step(2)
    assert [one.state for one in world.ledger.jobs.tries["a"]] == [JobState.FAILED, JobState.RUNNING]
    assert any("restart 1 of 1" in event.message for event in world.ledger.jobs.history["a"])
    world.engine.end("a", LOST, attempt=2)
    world.step()
    assert (world.job().state, world.job().failure) == (JobState.FAILED, LOST)
    world.ledger.jobs.add("b", retries={"max": 5})
    world.step()
    world.engine.end("b", BUG)
    world.step()
    assert (world.job("b").state, world.job("b").failure) == (JobState.FAILED, BUG)


def test_a_node_of_servers_is_to_blame_if_it_failed_and_does_not_count_otherwise(world: World) -> None:
    world.ledger.jobs.add("a", resources={"nodes": 1}, servers={"count": 1})
    world.step()
    folder = paths.attempt_folder(world.home, "a", 1)
    folder.mkdir(parents=True)
    attempt_files.write_exit_record(folder, 0, ExitRecord("stopped", message="ended with node 1, which failed"))
    attempt_files.write_exit_record(
        folder, 1, ExitRecord("failed", Cause.USER_CODE, "server 0 ended with exit code 1", exit_code=1)
    )
    world.engine.end("a", LOST)
    world.step()
    failure = world.job().failure
    assert failure is not None
    assert (failure.node, failure.message) == (1, "server 0 ended with exit code 1")


def test_a_stopped_job_is_stopped_and_one_that_had_succeeded_stays_so(world: World) -> None:
    for id in "ab":
        world.ledger.jobs.add(id)
    world.step()
    for id in "ab":
        world.ledger.jobs.change(id, JobState.STOPPING, "stopped by ann")
    world.engine.end("b")
    world.step(2)
    assert (world.job("a").state, world.job("a").reason) == (JobState.STOPPED, "stopped by ann")
    assert world.job("b").state is JobState.SUCCEEDED


def test_a_job_stopped_before_it_was_handed_over_never_starts(world: World) -> None:
    world.ledger.jobs.add("a")
    world.ledger.jobs.begin_attempt("a")
    world.ledger.jobs.change("a", JobState.STOPPING, "stopped by ann")
    world.step(2)
    assert world.job().state is JobState.STOPPED
    assert world.engine.runs == {}


def test_a_job_stopped_while_the_controller_moves_it_is_looked_at_again(world: World) -> None:
    world.ledger.jobs.add("a")
    begin = world.ledger.jobs.begin_attempt

    def stopped_first(job: str) -> Any:
        world.ledger.jobs.change(job, JobState.STOPPED, "stopped by ann")
        return begin(job)

    world.ledger.jobs.begin_attempt = stopped_first  # type: ignore[method-assign]
    world.step(2)
    assert world.job().state is JobState.STOPPED
    assert world.engine.runs == {}


def test_an_engine_that_does_not_answer_is_asked_less_and_less(world: World) -> None:
    world.ledger.jobs.add("a")
    world.step()
    world.engine.calls, world.engine.error = [], BackendError("no route.")
    world.step(100)
    assert world.job().state is JobState.RUNNING
    assert world.job().reason.startswith("local does not answer: no route. Next try in")
    assert len(world.engine.calls) < 12
    world.engine.error = None
    world.engine.end("a")
    world.step(70)
    assert world.job().state is JobState.SUCCEEDED


def test_an_engine_that_takes_nothing_fails_the_job_in_the_end(world: World) -> None:
    world.ledger.jobs.add("a")
    world.engine.error = BackendError("no account")
    world.step(30, SUBMIT_S / 20)
    failure = world.job().failure
    assert failure is not None
    assert failure.cause is Cause.BACKEND
    assert "no account" in failure.message


def test_what_an_engine_refuses_or_a_secret_that_is_gone_fails_at_once(world: World) -> None:
    world.ledger.jobs.add("a")
    world.engine.error = SpecError("no such partition")
    world.step()
    assert world.job().state is JobState.FAILED
    world.engine.error = None
    world.ledger.jobs.add("b", secrets=["TOKEN"])
    world.step()
    assert world.job("b").state is JobState.FAILED
    assert "There is no secret 'TOKEN'" in world.job("b").reason
    world.ledger.secrets.by_name["TOKEN"] = "value"
    world.ledger.jobs.add("c", secrets=["TOKEN"])
    world.step()
    assert world.engine.secrets == {"TOKEN": "value"}


def test_silence_of_all_ranks_is_a_hang_and_is_started_again(world: World) -> None:
    world.ledger.jobs.add("a", retries={"max": 1, "hang_after": "60s"})
    world.step()
    log = paths.logs(paths.attempt_folder(world.home, "a", 1)) / "workerlog.0"
    log.parent.mkdir(parents=True)
    log.touch()
    os.utime(log, (world.clock.now, world.clock.now))
    world.step(50)
    assert len(world.ledger.jobs.tries["a"]) == 1
    world.step(40)
    first, second = world.ledger.jobs.tries["a"]
    assert (first.failure and first.failure.cause, second.state) == (Cause.HANG, JobState.RUNNING)


def test_the_controller_ends_what_runs_too_long_if_its_nodes_do_not(world: World) -> None:
    world.ledger.jobs.add("a", max_runtime="60s", grace="10s")
    world.step(95)
    assert world.job().state is JobState.RUNNING
    world.step(20)
    failure = world.job().failure
    assert failure is not None
    assert failure.cause is Cause.TIMEOUT


def test_another_controller_knows_why_an_attempt_was_being_ended(world: World) -> None:
    world.ledger.jobs.add("a", max_runtime="10s", grace="1s")
    world.step()
    world.engine.stop = lambda *_: None  # type: ignore[method-assign]
    world.step(60)
    world.controller = world.another()
    world.engine.end("a", Failure(Cause.PREEMPTED, "ended by us"))
    world.step()
    failure = world.job().failure
    assert failure is not None
    assert failure.cause is Cause.TIMEOUT


def test_only_one_home_keeps_until_its_lease_runs_out(world: World) -> None:
    world.ledger.jobs.add("a")
    other = world.another("other")
    world.step()
    world.ledger.jobs.add("b")
    other.step()
    assert world.job("b").state is JobState.QUEUED
    world.clock.now += LEASE_S + 1
    other.step()
    assert world.job("b").state is JobState.RUNNING


def test_an_error_nobody_thought_of_does_not_end_the_controller(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.ledger.jobs.add("a")
    world.step()
    world.clock.now += 10.0
    world.engine.error = RuntimeError("a bug")

    class Turns(threading.Event):
        """Time passes, and the bug is met once."""

        def wait(self, timeout: float | None = None) -> bool:
            world.clock.now += 10.0
            world.engine.error = None
            world.engine.end("a")
            return False

    world.controller.run(Turns(), until_idle=True)
    assert "the job controller starts over" in caplog.text
    assert world.job().state is JobState.SUCCEEDED


class Killed(BaseException):
    """The controller's process has ended here."""


def mortal(target: Any, names: tuple[str, ...], dies: Callable[[], bool]) -> None:
    """Let calls of `target` kill the controller before or after they act."""

    def wrapped(act: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            if dies():
                raise Killed
            result = act(*arguments, **more)
            if dies():
                raise Killed
            return result

        return call

    for name in names:
        setattr(target, name, wrapped(getattr(target, name)))


def live_through(world: World, chance: random.Random, turns: int, seen: dict[str, JobState]) -> None:
    """Let a controller that may die work while attempts end at random and people stop jobs; no job leaves its end."""
    for _ in range(turns):
        world.clock.now += chance.random() * 10
        try:
            world.controller.step()
        except Killed:
            world.controller = world.another()
        for (id, number), status in list(world.engine.runs.items()):
            if status.phase is Phase.RUNNING and chance.random() < 0.2:
                world.engine.end(id, chance.choice([None, LOST, BUG]), number)
        id, job = chance.choice(list(world.ledger.jobs.rows.items()))
        if chance.random() < 0.02 and not job.state.is_terminal and job.state is not JobState.STOPPING:
            MemoryJobs.change(world.ledger.jobs, id, JobState.STOPPING, "stopped by ann")
        ended = {id: job.state for id, job in world.ledger.jobs.rows.items() if job.state.is_terminal}
        assert seen.items() <= ended.items()
        seen |= ended


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=50)
def test_no_death_of_the_controller_loses_a_job_or_starts_an_attempt_twice(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    chance = random.Random(seed)
    world, odds, seen = World(tmp_path_factory.getbasetemp()), [0.05], dict[str, JobState]()
    for target, names in (
        (world.ledger.jobs, ("begin_attempt", "set_handle", "change", "append_event", "explain", "attempts", "find")),
        (world.engine, ("submit", "status", "stop", "cleanup")),
    ):
        mortal(target, names, lambda: chance.random() < odds[0])
    for number in range(6):
        world.ledger.jobs.add(f"j{number}", retries={"max": number % 3}, backend=chance.choice(["local", "slurm"]))
    live_through(world, chance, 150, seen)
    odds[0] = 0.0
    live_through(world, chance, 150, seen)
    for id, job in world.ledger.jobs.rows.items():
        tries = world.ledger.jobs.tries[id]
        ran = [status.phase for (owner, _), status in world.engine.runs.items() if owner == id]
        assert job.state.is_terminal
        assert [one.number for one in tries] == list(range(1, len(tries) + 1))
        assert len(tries) <= 1 + int(id[1]) % 3
        assert all(one.ended is not None for one in tries)
        assert Phase.RUNNING not in ran
        assert (job.state is JobState.SUCCEEDED) == (Phase.SUCCEEDED in ran)
