"""The states of a job, why it is in one, and why it failed. Pure."""

from __future__ import annotations

from enum import StrEnum


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
