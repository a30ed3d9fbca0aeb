"""`AttemptController`: submit, poll and end one attempt, idempotently."""

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
from phalanx.jobs.attempt.files import ExitRecord, all_succeeded, any_failed
from phalanx.jobs.backend import Backend, Phase, Status, Submission
from phalanx.jobs.backend_registry import BACKENDS
from phalanx.jobs.models import Attempt, Cause, Event, Failure, Job, JobState
from phalanx.jobs.paths import attempt_folder
from phalanx.jobs.spec.training_job import TrainingJob, secrets_of
from phalanx.jobs.store import JobDatabase

logger = logging.getLogger("phalanx.jobs")

ENDING = "ending"
"""Kind of the event that records why a running attempt is being ended; a later controller reads it."""

FIRST_RETRY_S = 0.5
MAX_RETRY_S = 60.0
"""Shortest and longest time between two tries at a backend that does not answer; it doubles from one to the next."""

FILES_EVERY_S = 10.0
"""Time between two checks of how large log files are and when they last grew."""

SUBMIT_S = 600.0
"""How long the submission of an attempt is retried while its backend refuses it."""

NODES_END_S = 10.0
"""How long the nodes of an attempt get to end by themselves after one has failed, before they are stopped."""

OVERDUE_S = 30.0
"""How much later than the nodes themselves the controller ends an attempt that runs too long."""


class AttemptController:
    """An attempt that has not ended."""

    def __init__(
        self,
        store: JobDatabase,
        backend: Backend,
        home: Path,
        job: Job,
        spec: TrainingJob,
        clock: Callable[[], float],
    ) -> None:
        """Supervise an attempt; one that an earlier controller began is resumed where that one stopped.

        Args:
            store: The store.
            backend: The backend of the job.
            home: The folder of all state.
            job: The job, whose last attempt is meant.
            spec: Its spec.
            clock: Seconds since the epoch.
        """
        self.job = job
        self.spec = spec
        self.number = job.attempt
        self.folder = attempt_folder(home, job.id, job.attempt)
        self.next_poll = 0.0
        self._store, self._backend, self._clock = store, backend, clock
        self._attempts = store.jobs.attempts(job.id)
        self._handle = self._attempts[-1].handle
        self._ending_failure = _read_ending_failure(store.jobs.events(job.id), self.number) if self._handle else None
        self._submitting_since = clock()
        self._failing_since: float | None = None
        self._failed_polls = 0
        self._next_files = 0.0
        self._reason = job.reason

    @property
    def attempt(self) -> Attempt:
        """The attempt as it was when its supervision began."""
        return self._attempts[-1]

    def poll(self, job: Job) -> bool:
        """Do what is due for the attempt of `job`, which is as in the store now; return whether the attempt has ended.

        Raises:
            StateError: If the job changed its state meanwhile; poll again with the job as it is then.
        """
        self.job = job
        try:
            ended = self._poll()
        except StateError:
            raise
        except (PhalanxError, OSError, ValueError) as error:
            # A backend that does not answer now may later, and one job must not block the others.
            self._failed_polls += 1
            wait = min(MAX_RETRY_S, FIRST_RETRY_S * 2**self._failed_polls)
            self.next_poll = self._clock() + wait
            self._set_reason(f"{job.backend} does not answer: {error} Next try in {wait:.0f} s.")
            return False
        self._failed_polls = 0
        self.next_poll = self._clock() + BACKENDS[job.backend].poll_s
        return ended

    def _poll(self) -> bool:
        stopping = self.job.state is JobState.STOPPING
        if not self._handle and not stopping:
            failure = self._submit()
            if failure is not None:
                return self._fail(failure)
        submission = self._submission({})
        status = self._backend.status(submission, self._handle)
        self._backend.collect(submission, self._handle)
        has_ended = status.phase in (Phase.SUCCEEDED, Phase.FAILED, Phase.GONE)
        records = self._exit_records()
        if self.spec.resources.least_nodes is not None:
            records = attempt_files.deciding_records(records, has_ended=has_ended)
        if has_ended:
            return self._finish(submission, status, records)
        if stopping:
            self._backend.stop(submission, self._handle, self.spec.grace)
            return False
        self._update_state(status)
        self._check_limits(status, records)
        if self._ending_failure is not None:
            self._backend.stop(submission, self._handle, self.spec.grace)
        return False

    def _exit_records(self) -> dict[int, ExitRecord | None]:
        """How nodes ended. Those that hold servers only count if they failed: others are ended with the training."""
        nodes, servers = self.spec.resources.nodes, self.spec.servers
        records = {node: attempt_files.read_exit_record(self.folder, node) for node in range(nodes)}
        if all_succeeded(records.values()):
            return records
        for node in range(nodes, nodes + (servers.count if servers else 0)):
            record = attempt_files.read_exit_record(self.folder, node)
            if record is not None and record.outcome == "failed":
                records[node] = record
        return records

    def _submission(self, secrets: dict[str, str]) -> Submission:
        return Submission(self.job.id, self.number, self.spec, self.folder, secrets)

    def _submit(self) -> Failure | None:
        """Submit the attempt; return why it can never run. BackendError means that it is tried again."""
        try:
            secrets = self._store.secrets.values(self.job.workspace, secrets_of(self.job.spec))
            self._handle = self._backend.submit(self._submission(secrets))
        except BackendError as error:
            tried_s = self._clock() - self._submitting_since
            if tried_s < SUBMIT_S:
                raise
            return submit_failure(error, tried_s)
        except PhalanxError as error:
            return submit_failure(error)
        self._store.jobs.set_handle(self.job.id, self.number, self._handle)
        return None

    def _update_state(self, status: Status) -> None:
        """Set the state of the job to what its backend reports."""
        state = {Phase.PREPARING: JobState.PREPARING, Phase.RUNNING: JobState.RUNNING}.get(status.phase, self.job.state)
        prefix = "" if BACKENDS[self.job.backend].uses_this_machine else f"{self.job.backend}: "
        reason = f"{prefix}{status.reason}" if status.reason and status.phase is not Phase.RUNNING else ""
        has_advanced = state is not self.job.state and self.job.state is not JobState.RUNNING
        if has_advanced:
            self.job = self._store.jobs.change(self.job.id, state, reason)
            self._reason = reason
            if state is JobState.RUNNING:
                self._attempts[-1] = self._store.jobs.attempts(self.job.id)[-1]
        elif self._ending_failure is None:
            self._set_reason(reason)

    def _check_limits(self, status: Status, records: dict[int, ExitRecord | None]) -> None:
        """Find reasons to end an attempt whose backend would let it run on."""
        now = self._clock()
        if status.failure is not None:
            self._end_with(status.failure)
        if any_failed(records.values()):
            self._failing_since = self._failing_since or now
            if now > self._failing_since + NODES_END_S and (failure := failure_of(records, status)):
                self._end_with(failure)
        limit, started = self.spec.max_runtime, self.attempt.started
        if limit and started and now > started.timestamp() + limit + self.spec.grace + OVERDUE_S:
            self._end_with(timeout_failure(limit))
        if now >= self._next_files:
            self._next_files = now + FILES_EVERY_S
            logs.cap_sizes(self.folder)
            self._check_hang(now)

    def _check_hang(self, now: float) -> None:
        limit_s, started = self.spec.retries.hang_after, self.attempt.started
        if limit_s is None or started is None or self.job.state is not JobState.RUNNING:
            return
        silent_s = now - max(started.timestamp(), logs.last_sign(self.folder))
        if silent_s > limit_s:
            self._end_with(hang_failure(silent_s, logs.last_signs(self.folder)))

    def _end_with(self, failure: Failure) -> None:
        if self._ending_failure is None:
            self._store.jobs.append_event(
                self.job.id, ENDING, failure.message, {"attempt": self.number, **asdict(failure)}
            )
            self._ending_failure = failure
            self._set_reason(f"ending attempt {self.number}: {failure.message}")

    def _finish(self, submission: Submission, status: Status, records: dict[int, ExitRecord | None]) -> bool:
        self._backend.cleanup(submission, self._handle)
        logs.cap_sizes(self.folder)
        failure = failure_of(records, status)
        started = _first_start(records)
        if failure is None:
            self._pass_through_running(started)
            self._store.jobs.change(self.job.id, JobState.SUCCEEDED, started=started)
            return True
        has_failed = any_failed(records.values())
        if self.job.state is JobState.STOPPING and (
            not has_failed or failure.cause in (Cause.NODE_FAILURE, Cause.PREEMPTED)
        ):
            self._store.jobs.change(self.job.id, JobState.STOPPED, self.job.reason)
            return True
        return self._fail(self._ending_failure or failure, started)

    def _fail(self, failure: Failure, started: datetime | None = None) -> bool:
        is_retried = should_retry(self.spec, self._attempts, failure) and self.job.state is not JobState.STOPPING
        if not is_retried:
            self._store.jobs.change(self.job.id, JobState.FAILED, failure.message, failure=failure, started=started)
            return True
        self._pass_through_running(started)
        reason = (
            f"attempt {self.number} failed ({failure.cause}: {failure.message}); "
            f"restart {self.number} of {self.spec.retries.max}"
        )
        self._store.jobs.change(self.job.id, JobState.RESTARTING, reason, failure=failure, started=started)
        return True

    def _pass_through_running(self, started: datetime | None) -> None:
        """Enter RUNNING, which an attempt that began and ended between two polls would skip."""
        if self.job.state in (JobState.QUEUED, JobState.RESTARTING):
            self.job = self._store.jobs.change(self.job.id, JobState.RUNNING, started=started)

    def _set_reason(self, reason: str) -> None:
        if reason != self._reason:
            self._reason = reason
            self._store.jobs.explain({self.job.id: reason})


def _first_start(records: Mapping[int, ExitRecord | None]) -> datetime | None:
    """Return when the first node began, if a node recorded it."""
    times = [record.started for record in records.values() if record is not None and record.started]
    return datetime.fromtimestamp(min(times), UTC) if times else None


def _read_ending_failure(events: list[Event], number: int) -> Failure | None:
    """Return why an earlier controller was ending attempt `number`."""
    data = next((e.data for e in events if e.kind == ENDING and e.data["attempt"] == number), None)
    if data is None:
        return None
    values: dict[str, Any] = {name: value for name, value in data.items() if name != "attempt"}
    return replace(Failure(**values), cause=Cause(values["cause"]))
