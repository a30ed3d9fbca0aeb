"""A store of jobs in memory, for tests of the controller: what that asks of `phalanx.jobs.store.JobDatabase`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from phalanx.errors import NotFoundError, StateError
from phalanx.jobs.models import Attempt, Event, Failure, Job, JobState, may_follow
from phalanx.jobs.spec.training_job import TrainingJob


class MemoryStore:
    """The parts of a store that a controller uses."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.jobs = MemoryJobs(clock)
        self.leases = MemoryLeases(clock)
        self.secrets = MemorySecrets()


class MemoryJobs:
    """Jobs, attempts and events as values in dictionaries."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.rows: dict[str, Job] = {}
        self.tries: dict[str, list[Attempt]] = {}
        self.history: dict[str, list[Event]] = {}
        self.explained = 0
        self.version = 0

    def now(self) -> datetime:
        return datetime.fromtimestamp(self._clock(), UTC)

    def add(self, id: str, *, owner: str = "ann", backend: str = "local", **spec: Any) -> Job:
        made = TrainingJob.model_validate({"name": "j", "command": "nap 1", "backend": backend, **spec})
        job = Job(
            id,
            "default",
            "j",
            owner,
            JobState.QUEUED,
            "",
            backend,
            made.priority,
            made.model_dump(mode="json"),
            self.now(),
        )
        self.rows[id], self.tries[id], self.history[id] = job, [], []
        self.version += 1
        return job

    def last_change(self) -> int:
        return self.version

    def find(self, *, states: Collection[JobState] = (), ended_after: datetime | None = None) -> list[Job]:
        found = [job for job in self.rows.values() if not states or job.state in states]
        return [job for job in reversed(found) if ended_after is None or (job.ended and job.ended > ended_after)]

    def attempts(self, job: str) -> list[Attempt]:
        return list(self.tries[job])

    def events(self, job: str) -> list[Event]:
        return list(self.history[job])

    def begin_attempt(self, job: str) -> Attempt:
        row, tries = self.rows[job], self.tries[job]
        if row.state not in (JobState.QUEUED, JobState.RESTARTING) or (tries and tries[-1].ended is None):
            raise StateError(f"Job {job} can have no new attempt now.")
        tries.append(Attempt(job, len(tries) + 1, JobState.QUEUED, created=self.now()))
        self.rows[job] = replace(row, attempt=len(tries))
        self.version += 1
        return tries[-1]

    def set_handle(self, job: str, number: int, handle: str) -> None:
        self.tries[job][number - 1] = replace(self.tries[job][number - 1], handle=handle)

    def change(
        self,
        job: str,
        state: JobState,
        reason: str = "",
        *,
        failure: Failure | None = None,
        started: datetime | None = None,
    ) -> Job:
        row, tries = self.rows[job], self.tries[job]
        if not may_follow(row.state, state):
            raise StateError(f"Job {job} is {row.state}; it cannot become {state}.")
        now = self.now()
        began = started or (now if state is JobState.RUNNING else None)
        self.rows[job] = replace(row, state=state, reason=reason, started=row.started or began)
        if state.is_terminal:
            self.rows[job] = replace(self.rows[job], ended=now, failure=failure)
        if tries and tries[-1].ended is None:
            over = state.is_terminal or state is JobState.RESTARTING
            own = JobState.FAILED if state is JobState.RESTARTING else state
            begun = tries[-1].started or began
            tries[-1] = replace(tries[-1], state=own, failure=failure, started=begun, ended=now if over else None)
        self._event(job, "state", reason, {"to": state})
        return self.rows[job]

    def append_event(self, job: str, kind: str, message: str, data: Mapping[str, Any] | None = None) -> None:
        self._event(job, kind, message, data or {})

    def _event(self, job: str, kind: str, message: str, data: Mapping[str, Any]) -> None:
        self.history[job].append(Event(job, len(self.history[job]) + 1, self.now(), kind, message, dict(data)))
        self.version += 1

    def explain(self, reasons: Mapping[str, str]) -> None:
        for job, reason in reasons.items():
            self.rows[job] = replace(self.rows[job], reason=reason)
            self.explained += 1


class MemoryLeases:
    """Leases: holder and end by name."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.held: dict[str, tuple[str, float]] = {}

    def take(self, name: str, holder: str, seconds: float) -> bool:
        other, until = self.held.get(name, (holder, 0.0))
        if other != holder and until >= self._clock():
            return False
        self.held[name] = holder, self._clock() + seconds
        return True

    def holder(self, name: str) -> str | None:
        holder, until = self.held.get(name, (None, 0.0))
        return holder if until >= self._clock() else None

    def release(self, name: str, holder: str) -> None:
        if self.holder(name) == holder:
            del self.held[name]


class MemorySecrets:
    """Values by name, the same in every workspace."""

    def __init__(self) -> None:
        self.by_name: dict[str, str] = {}

    def values(self, workspace: str, names: Sequence[str]) -> dict[str, str]:
        if missing := [name for name in names if name not in self.by_name]:
            raise NotFoundError(f"There is no secret {missing[0]!r}.")
        return {name: self.by_name[name] for name in names}
