"""Data classes of the store: Workspace, Job, JobState, Attempt, Failure, Event, ... (pure)."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any


class JobState(StrEnum):
    """Where a job is. The last three are terminal: a job never leaves them.

    queued -> preparing -> running -> succeeded
       ^          |           |-----> failed
       |          v           v
       +----- restarting <----+       stopping -> stopped   (from any state that is not terminal)
    """

    QUEUED = "queued"
    PREPARING = "preparing"
    RUNNING = "running"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def is_terminal(self) -> bool:
        """Whether a job stays in this state for ever."""
        return self in _TERMINAL


_TERMINAL = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.STOPPED})

_NEXT: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset(
        {JobState.PREPARING, JobState.RUNNING, JobState.FAILED, JobState.STOPPING, JobState.STOPPED}
    ),
    JobState.PREPARING: frozenset(
        {JobState.RUNNING, JobState.RESTARTING, JobState.SUCCEEDED, JobState.FAILED, JobState.STOPPING}
    ),
    JobState.RUNNING: frozenset({JobState.RESTARTING, JobState.SUCCEEDED, JobState.FAILED, JobState.STOPPING}),
    JobState.RESTARTING: frozenset(
        {JobState.QUEUED, JobState.PREPARING, JobState.RUNNING, JobState.FAILED, JobState.STOPPING}
    ),
    # A job that ended before the stop reached it keeps its own end.
    JobState.STOPPING: frozenset({JobState.STOPPED, JobState.SUCCEEDED, JobState.FAILED}),
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.STOPPED: frozenset(),
}


def may_follow(before: JobState, after: JobState) -> bool:
    """Return whether a job in state `before` may go to state `after`."""
    return after in _NEXT[before]


class Cause(StrEnum):
    """Why an attempt failed; `retries.on` of a job lists the causes that are retried."""

    USER_CODE = "user_code"
    OOM = "oom"
    NODE_FAILURE = "node_failure"
    PREEMPTED = "preempted"
    TIMEOUT = "timeout"
    HANG = "hang"
    SETUP = "setup"
    BACKEND = "backend"


class MemberRole(StrEnum):
    """What a member may do in a workspace; each role may do what those before it may."""

    VIEWER = "viewer"
    DEVELOPER = "developer"
    ADMIN = "admin"


@dataclass(frozen=True)
class Actor:
    """Who asks. `owner` is the user who owns the store's files, who may do everything everywhere."""

    name: str
    owner: bool = False


@dataclass(frozen=True)
class Workspace:
    """A space of jobs, code sources, datasets and secrets that only its members see."""

    name: str
    created: datetime
    members: dict[str, MemberRole] = field(default_factory=dict)


@dataclass(frozen=True)
class QueueLength:
    """How many jobs wait in one queue of a backend."""

    backend: str
    queue: str
    jobs: int


@dataclass(frozen=True)
class ResourceUse:
    """How much of a resource jobs use, and how much there is: cores, bytes of memory or GPUs."""

    used: float
    total: float


@dataclass(frozen=True)
class Counts:
    """How many jobs and attempts there are.

    Attributes:
        jobs: By state.
        attempts: By state.
        waiting: Queues in which jobs wait to start.
    """

    jobs: dict[str, int]
    attempts: dict[str, int]
    waiting: list[QueueLength]


@dataclass(frozen=True)
class NamedConfig:
    """A code or dataset configuration of a workspace: its name and its validated content as JSON."""

    workspace: str
    name: str
    config: dict[str, Any]
    created: datetime


@dataclass(frozen=True)
class Failure:
    """Why an attempt failed: the cause, and what a person needs to act on it.

    `rank` is None where no rank is to blame; `detail` is the traceback or the last lines, `exit_code` negative for a
    signal, as subprocess has it.
    """

    cause: Cause
    message: str
    node: int | None = None
    rank: int | None = None
    exit_code: int | None = None
    detail: str = ""


@dataclass(frozen=True)
class Attempt:
    """One submission of a job to its backend. `handle` is the backend's own name for it, empty until submitted."""

    job: str
    number: int
    state: JobState
    handle: str = ""
    reason: str = ""
    failure: Failure | None = None
    created: datetime | None = None
    started: datetime | None = None
    ended: datetime | None = None

    @property
    def failed_log(self) -> str:
        """Name of the log of the rank that is to blame for its end; empty where none is."""
        return "" if self.failure is None or self.failure.rank is None else str(self.failure.rank)


@dataclass(frozen=True)
class Event:
    """One line of a job's append-only history; `data` is JSON."""

    job: str
    number: int
    time: datetime
    kind: str
    message: str
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """A submitted job. `spec` is the resolved TrainingJob as JSON; submitting it again trains the same thing.

    `reason` is why the job is in its state: why it is still queued, what is being prepared, who stopped it.
    """

    id: str
    workspace: str
    name: str
    owner: str
    state: JobState
    reason: str
    backend: str
    priority: int
    spec: dict[str, Any]
    created: datetime
    started: datetime | None = None
    ended: datetime | None = None
    attempt: int = 0
    failure: Failure | None = None
    retry_of: str | None = None
