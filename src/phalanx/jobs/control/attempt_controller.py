"""Supervises one attempt: submits it, polls its backend, ends it. Every step may be repeated after a crash."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from phalanx.errors import BackendError, PhalanxError, StateError
from phalanx.jobs.attempt import files as attempt_files
from phalanx.jobs.attempt import logs
from phalanx.jobs.attempt.failures import failure_of, hang_failure, should_retry, submit_failure, timeout_failure
from phalanx.jobs.attempt.files import ExitRecord
from phalanx.jobs.backend import Backend, Phase, Status, Submission
from phalanx.jobs.control.job_state_store import JobStateStore
from phalanx.jobs.models import Attempt, Event, Failure, Job
from phalanx.jobs.paths import attempt_folder
from phalanx.jobs.spec import TrainingJob, secrets_of
from phalanx.jobs.states import Cause, JobState

logger = logging.getLogger("phalanx.jobs")

BLAME = "ending"
"""Kind of the event that says why a live attempt is being ended; a later controller reads it."""

LOCAL_EVERY_S = 0.5
REMOTE_EVERY_S = 5.0
"""Times between two looks at an attempt: on this machine a few system calls, elsewhere a request to an engine."""

FILES_EVERY_S = 10.0
"""Time between two looks at how long ago logs grew, and how large they are."""

BACK_OFF_S = 60.0
"""Longest time between two tries at an engine that does not answer."""

REFUSED_S = 600.0
"""How long an attempt is offered to an engine that does not take it."""

TOGETHER_S = 10.0
"""How long the nodes of an attempt get to end by themselves when one has failed, before they are asked to."""

OVERDUE_S = 30.0
"""How much later than the nodes themselves the controller ends an attempt that runs too long."""


class AttemptController:
    """An attempt that has not ended."""

    def __init__(
        self,
        ledger: JobStateStore,
        backend: Backend,
        home: Path,
        job: Job,
        spec: TrainingJob,
        clock: Callable[[], float],
    ) -> None:
        """Take an attempt into care; one that an earlier controller began goes on where that one stopped.

        Args:
            ledger: The store.
            backend: The engine of the job.
            home: The folder of all state.
            job: The job, whose last attempt is meant.
            spec: Its spec.
            clock: Seconds since the epoch.
        """
        self.job = job
        self.spec = spec
        self.number = job.attempt
        self.folder = attempt_folder(home, job.id, job.attempt)
        self.next_look = 0.0
        self._ledger, self._backend, self._clock = ledger, backend, clock
        self._attempts = ledger.attempts(job.id)
        self._handle = self._attempts[-1].handle
        self._blamed = _blamed(ledger.events(job.id), self.number) if self._handle else None
        self._began = clock()
        self._failing_since: float | None = None
        self._tries = 0
        self._next_files = 0.0
        self._reason = job.reason

    @property
    def attempt(self) -> Attempt:
        """The attempt as it was when it came into care."""
        return self._attempts[-1]

    def look(self, job: Job) -> bool:
        """See to the attempt of `job` as the store has it now; returns whether the attempt has ended.

        Raises:
            StateError: If somebody else moved the job meanwhile; look again with the job as it is then.
        """
        self.job = job
        try:
            ended = self._look()
        except StateError:
            raise
        except (PhalanxError, OSError, ValueError) as error:
            # An engine that does not answer now may later, and one job must not keep the others waiting.
            self._tries += 1
            wait = min(BACK_OFF_S, LOCAL_EVERY_S * 2**self._tries)
            self.next_look = self._clock() + wait
            self._explain(f"{job.backend} cannot be asked: {error} Tried again in {wait:.0f} s.")
            return False
        self._tries = 0
        self.next_look = self._clock() + (LOCAL_EVERY_S if job.backend == "local" else REMOTE_EVERY_S)
        return ended

    def _look(self) -> bool:
        stopping = self.job.state is JobState.STOPPING
        if not self._handle and not stopping:
            failure = self._submit()
            if failure is not None:
                return self._failed(failure)
        submission = self._submission({})
        status = self._backend.status(submission, self._handle)
        self._backend.collect(submission, self._handle)
        ends = self._ends()
        if status.phase in (Phase.SUCCEEDED, Phase.FAILED, Phase.GONE):
            return self._ended(submission, status, ends)
        if stopping:
            self._backend.stop(submission, self._handle, self.spec.grace)
            return False
        self._follow(status)
        self._judge(status, ends)
        if self._blamed is not None:
            self._backend.stop(submission, self._handle, self.spec.grace)
        return False

    def _ends(self) -> dict[int, ExitRecord | None]:
        """How nodes ended. Those that hold servers only count if they failed: others are ended with the training."""
        nodes, servers = self.spec.resources.nodes, self.spec.servers
        ends = {node: attempt_files.read_exit_record(self.folder, node) for node in range(nodes)}
        if all(end is not None and end.outcome == "succeeded" for end in ends.values()):
            return ends
        for node in range(nodes, nodes + (servers.count if servers else 0)):
            end = attempt_files.read_exit_record(self.folder, node)
            if end is not None and end.outcome == "failed":
                ends[node] = end
        return ends

    def _submission(self, secrets: dict[str, str]) -> Submission:
        return Submission(self.job.id, self.number, self.spec, self.folder, secrets)

    def _submit(self) -> Failure | None:
        """Hand the attempt over; returns why it can never be, BackendError is for another try."""
        try:
            secrets = self._ledger.secret_values(self.job.workspace, secrets_of(self.job.spec))
            self._handle = self._backend.submit(self._submission(secrets))
        except BackendError as error:
            tried = self._clock() - self._began
            if tried < REFUSED_S:
                raise
            return submit_failure(error, tried)
        except PhalanxError as error:
            return submit_failure(error)
        self._ledger.submitted(self.job.id, self.number, self._handle)
        return None

    def _follow(self, status: Status) -> None:
        """Let the job's state say what its backend says."""
        state = {Phase.PREPARING: JobState.PREPARING, Phase.RUNNING: JobState.RUNNING}.get(status.phase, self.job.state)
        prefix = "" if self.job.backend == "local" else f"{self.job.backend}: "
        reason = f"{prefix}{status.reason}" if status.reason and status.phase is not Phase.RUNNING else ""
        later = state is not self.job.state and self.job.state is not JobState.RUNNING
        if later:
            self.job = self._ledger.change(self.job.id, state, reason)
            self._reason = reason
            if state is JobState.RUNNING:
                self._attempts[-1] = self._ledger.attempts(self.job.id)[-1]
        elif self._blamed is None:
            self._explain(reason)

    def _judge(self, status: Status, ends: dict[int, ExitRecord | None]) -> None:
        """Find reasons to end an attempt whose backend would let it run on."""
        now = self._clock()
        if status.failure is not None:
            self._blame(status.failure)
        if any(end is not None and end.outcome == "failed" for end in ends.values()):
            self._failing_since = self._failing_since or now
            if now > self._failing_since + TOGETHER_S and (failure := failure_of(ends, status)):
                self._blame(failure)
        limit, started = self.spec.max_runtime, self.attempt.started
        if limit and started and now > started.timestamp() + limit + self.spec.grace + OVERDUE_S:
            self._blame(timeout_failure(limit))
        if now >= self._next_files:
            self._next_files = now + FILES_EVERY_S
            logs.cap(self.folder)
            self._hang(now)

    def _hang(self, now: float) -> None:
        patience, started = self.spec.retries.hang_after, self.attempt.started
        if patience is None or started is None or self.job.state is not JobState.RUNNING:
            return
        silent = now - max(started.timestamp(), logs.last_sign(self.folder))
        if silent > patience:
            self._blame(hang_failure(silent, logs.signs(self.folder)))

    def _blame(self, failure: Failure) -> None:
        if self._blamed is None:
            self._ledger.append(self.job.id, BLAME, failure.message, {"attempt": self.number, **asdict(failure)})
            self._blamed = failure
            self._explain(f"ending attempt {self.number}: {failure.message}")

    def _ended(self, submission: Submission, status: Status, ends: dict[int, ExitRecord | None]) -> bool:
        self._backend.cleanup(submission, self._handle)
        logs.cap(self.folder)
        failure = failure_of(ends, status)
        started = _began(ends)
        if failure is None:
            self._through_running(started)
            self._ledger.change(self.job.id, JobState.SUCCEEDED, started=started)
            return True
        own = any(end is not None and end.outcome == "failed" for end in ends.values())
        if self.job.state is JobState.STOPPING and (not own or failure.cause in (Cause.NODE_FAILURE, Cause.PREEMPTED)):
            self._ledger.change(self.job.id, JobState.STOPPED, self.job.reason)
            return True
        return self._failed(self._blamed or failure, started)

    def _failed(self, failure: Failure, started: datetime | None = None) -> bool:
        again = should_retry(self.spec, self._attempts, failure) and self.job.state is not JobState.STOPPING
        if not again:
            self._ledger.change(self.job.id, JobState.FAILED, failure.message, failure=failure, started=started)
            return True
        self._through_running(started)
        reason = (
            f"attempt {self.number} failed ({failure.cause}: {failure.message}); "
            f"restart {self.number} of {self.spec.retries.max}"
        )
        self._ledger.change(self.job.id, JobState.RESTARTING, reason, failure=failure, started=started)
        return True

    def _through_running(self, started: datetime | None) -> None:
        """Pass the state between waiting and an end, for attempts that end between two looks."""
        if self.job.state in (JobState.QUEUED, JobState.RESTARTING):
            self.job = self._ledger.change(self.job.id, JobState.RUNNING, started=started)

    def _explain(self, reason: str) -> None:
        if reason != self._reason:
            self._reason = reason
            self._ledger.explain({self.job.id: reason})


def _began(ends: Mapping[int, ExitRecord | None]) -> datetime | None:
    """Return when the first node began its part, as far as nodes say."""
    times = [end.started for end in ends.values() if end is not None and end.started]
    return datetime.fromtimestamp(min(times), UTC) if times else None


def _blamed(events: list[Event], number: int) -> Failure | None:
    """Return why an earlier controller was ending attempt `number`."""
    data = next((e.data for e in events if e.kind == BLAME and e.data["attempt"] == number), None)
    if data is None:
        return None
    values: dict[str, Any] = {name: value for name, value in data.items() if name != "attempt"}
    return replace(Failure(**values), cause=Cause(values["cause"]))
