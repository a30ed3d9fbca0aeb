"""`failure_of`, `should_retry`: classify why an attempt failed, and whether it is retried (pure)."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace

from phalanx.jobs.attempt.files import ExitRecord, all_succeeded
from phalanx.jobs.backend import Phase, Status
from phalanx.jobs.models import Attempt, Cause, Failure
from phalanx.jobs.spec.training_job import TrainingJob

_OUT_OF_MEMORY = re.compile(
    r"\b(MemoryError|OutOfMemoryError|CUDA out of memory|std::bad_alloc|can't allocate memory|Cannot allocate memory)\b"
)
_LAST_LINES = 12
"""Last lines of a rank's output that are searched for its error; earlier ones may quote another rank's."""


def failure_of(records: Mapping[int, ExitRecord | None], status: Status) -> Failure | None:
    """Return why an attempt that has ended failed, or None if it succeeded.

    Args:
        records: What each node wrote about its end; None where it wrote nothing.
        status: What the backend says, which counts where no node says that it failed.
    """
    if records and all_succeeded(records.values()):
        return None
    failed = [(node, record) for node, record in records.items() if record is not None and record.outcome == "failed"]
    if failed:
        # A node that lost another one is seldom the cause, though it may be the first to report.
        node, record = min(failed, key=lambda item: (item[1].cause is Cause.NODE_FAILURE, item[1].ended, item[0]))
        return _rank_failure(node, record, status)
    if status.failure is not None:
        return status.failure
    stopped = next(
        ((node, record) for node, record in records.items() if record is not None and record.outcome == "stopped"), None
    )
    if stopped is not None:
        return Failure(Cause.PREEMPTED, f"node {stopped[0]} was {stopped[1].message}, and not by us", stopped[0])
    if status.phase is Phase.SUCCEEDED and not any(records.values()):
        return None
    missing = next((node for node, record in records.items() if record is None), 0)
    return lost_node_failure(missing, status.reason or "its backend knows nothing of it any more")


def _rank_failure(node: int, record: ExitRecord, status: Status) -> Failure:
    failure = Failure(
        record.cause or Cause.USER_CODE, record.message, node, record.rank, record.exit_code, record.detail
    )
    if failure.cause is not Cause.USER_CODE:
        return failure
    last = "\n".join(failure.detail.splitlines()[-_LAST_LINES:])
    if match := _OUT_OF_MEMORY.search(last):
        return replace(failure, cause=Cause.OOM, message=f"{failure.message}: out of memory ({match[0]})")
    if _signal(failure.exit_code) == signal.SIGKILL:
        if status.failure is not None and status.failure.cause is Cause.OOM:
            return replace(failure, cause=Cause.OOM, message=f"{failure.message}: {status.failure.message}")
        return replace(failure, cause=Cause.PREEMPTED, message=f"{failure.message}: killed from outside")
    if _signal(failure.exit_code) == signal.SIGTERM:
        return replace(failure, cause=Cause.PREEMPTED, message=f"{failure.message}: asked to end from outside")
    return failure


def _signal(exit_code: int | None) -> int | None:
    """Return the signal behind an exit code, as subprocess (negative) or as a shell (from 128 on) has it."""
    if exit_code is None or 0 <= exit_code <= 128:
        return None
    return -exit_code if exit_code < 0 else exit_code - 128


def lost_node_failure(node: int, why: str) -> Failure:
    """Return the failure of a node that ended without a word."""
    return Failure(Cause.NODE_FAILURE, f"node {node} was lost: {why}, and it left no exit record", node)


def oom_failure(node: int, count: int) -> Failure:
    """Return the failure of a node while which ran the kernel killed `count` processes to get memory back."""
    times = "a process" if count == 1 else f"{count} processes"
    return Failure(Cause.OOM, f"the kernel killed {times} of this machine because memory ran out", node)


FIRST_S = 2.0
"""How much earlier than all others a rank must fall silent to be named: the rest stop when they wait for it."""


def hang_failure(silent_s: float, signs: Mapping[str, float] | None = None) -> Failure:
    """Return the failure of an attempt all of whose ranks have been silent for too long.

    Args:
        silent_s: For how long.
        signs: When the log or the run events of each rank last grew, in seconds since the epoch, by name of its log.
    """
    message = f"no rank wrote a line or a run event for {silent_s:.0f} s (retries.hang_after)"
    order = sorted((signs or {}).items(), key=lambda sign: sign[1])
    if len(order) < 2 or order[1][1] - order[0][1] < FIRST_S:
        return Failure(Cause.HANG, message)
    name, earlier = order[0][0], order[1][1] - order[0][1]
    message = f"rank {name} fell silent first, {earlier:.0f} s before the others; {message}"
    return Failure(Cause.HANG, message, rank=int(name) if name.isdecimal() else None)


def timeout_failure(limit_s: float) -> Failure:
    """Return the failure of an attempt that runs longer than its job allows, and whose nodes did not end it."""
    return Failure(Cause.TIMEOUT, f"still running after max_runtime, {limit_s:g} s")


def submit_failure(error: Exception, tried_s: float | None = None) -> Failure:
    """Return the failure of an attempt that its backend did not take; `tried_s` seconds long, if it was asked again."""
    tried = "" if tried_s is None else f" for {tried_s:.0f} s"
    return Failure(Cause.BACKEND, f"could not be submitted{tried}: {error}")


def should_retry(spec: TrainingJob, attempts: Sequence[Attempt], failure: Failure) -> bool:
    """Return whether a job whose last attempt failed is started again.

    Args:
        spec: The job; its budget counts attempts after the first, whatever ended the one before.
        attempts: All attempts so far.
        failure: Why the last one failed.
    """
    return failure.cause in spec.retries.on and len(attempts) <= spec.retries.max
