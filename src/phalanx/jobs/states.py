"""The states of a job, why it is in one, and why it failed. Pure."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
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
    def terminal(self) -> bool:
        """Whether a job stays in this state for ever."""
        return self in _TERMINAL


_TERMINAL = frozenset({State.SUCCEEDED, State.FAILED, State.STOPPED})

_NEXT: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.PREPARING, State.RUNNING, State.FAILED, State.STOPPING, State.STOPPED}),
    State.PREPARING: frozenset({State.RUNNING, State.RESTARTING, State.SUCCEEDED, State.FAILED, State.STOPPING}),
    State.RUNNING: frozenset({State.RESTARTING, State.SUCCEEDED, State.FAILED, State.STOPPING}),
    State.RESTARTING: frozenset({State.QUEUED, State.PREPARING, State.RUNNING, State.FAILED, State.STOPPING}),
    # What had ended before the stop reached it keeps its own end.
    State.STOPPING: frozenset({State.STOPPED, State.SUCCEEDED, State.FAILED}),
    State.SUCCEEDED: frozenset(),
    State.FAILED: frozenset(),
    State.STOPPED: frozenset(),
}


def may_follow(before: State, after: State) -> bool:
    """Return whether a job in state `before` may go to state `after`."""
    return after in _NEXT[before]


class Cause(StrEnum):
    """Why an attempt failed; what is retried is said by cause (`retries.on` of a job)."""

    USER_CODE = "user_code"
    OOM = "oom"
    NODE_FAILURE = "node_failure"
    PREEMPTED = "preempted"
    TIMEOUT = "timeout"
    HANG = "hang"
    SETUP = "setup"
    BACKEND = "backend"
