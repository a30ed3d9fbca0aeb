"""`JobController`: the reconcile loop that moves jobs between states.

    python -m phalanx.jobs.control.controller HOME      ends when every job has ended

At most one controller runs. A lock on HOME/keeper.lock makes it one process per home: the process that starts a
controller passes it the lock, so one of many attempts succeeds. A lease in the store makes it one home where several
share a database. All versions use the same names for lock and lease.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from phalanx.errors import PhalanxError, StateError
from phalanx.files import liveness_lock
from phalanx.jobs.attempt.failures import submit_failure
from phalanx.jobs.backend import Backend
from phalanx.jobs.backend_registry import BACKENDS, Backends
from phalanx.jobs.control.attempt_controller import AttemptController
from phalanx.jobs.models import Failure, Job, JobState
from phalanx.jobs.scheduling import queue
from phalanx.jobs.scheduling.queue import Amount, RunningJob, WaitingJob
from phalanx.jobs.scheduling.quotas import Quotas
from phalanx.jobs.spec.training_job import TrainingJob
from phalanx.jobs.store import JobDatabase

logger = logging.getLogger("phalanx.jobs")

LEASE = "keeper"
LEASE_S = 15.0
"""How long a lease lasts that is not renewed; the controller of another home then takes over."""

STEP_S = min(entry.poll_s for entry in BACKENDS.values())
"""Pause between two steps while there are jobs."""

SCHEDULE_EVERY_S = 10.0
"""Time between two passes over the queue when nothing changed: priorities grow with waiting."""

USAGE_S = 86400.0
"""Period over which usage counts for fair share."""

USAGE_EVERY_S = 60.0
IDLE_S = 5.0
"""How long a background controller stays when no job is left."""

_NOT_ENDED = tuple(state for state in JobState if not state.is_terminal)
_QUEUED_HERE = frozenset(name for name, entry in BACKENDS.items() if entry.uses_this_machine)
"""Backends whose jobs this controller queues; others have queues of their own."""

_WAITING = (JobState.QUEUED, JobState.RESTARTING)


class JobController:
    """Supervises every job that has not ended. All state that must survive is in the store; the rest is a cache."""

    def __init__(
        self,
        store: JobDatabase,
        backends: Mapping[str, Backend],
        home: Path,
        *,
        machine: Amount,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Make a controller; nothing happens before its first `step`.

        Args:
            store: The store.
            backends: Backends by name. When a job starts on this machine is decided here.
            home: The folder of all state.
            machine: Resources of this machine.
            clock: Seconds since the epoch.
        """
        self._store, self._backends, self._home = store, backends, home
        self._machine, self._clock = machine, clock
        self._quotas = Quotas(home / "queues.yaml")
        self._holder = f"{os.uname().nodename}:{home}"
        self._leased_at = self._scheduled_at = self._usage_read_at = 0.0
        self._version: Any = None
        self._jobs: dict[str, Job] = {}
        self._attempts: dict[str, AttemptController] = {}
        self._specs: dict[str, TrainingJob | None] = {}
        self._ended_attempts: set[tuple[str, int]] = set()
        self._usage: dict[str, float] = {}

    @property
    def is_idle(self) -> bool:
        """Whether every job had ended at the last step."""
        return not self._jobs

    def step(self) -> float:
        """Do everything that is due; return how many seconds to wait before the next step.

        Does nothing while the controller of another home has the lease.
        """
        if not self._is_leader():
            return LEASE_S / 3
        changed = self._refresh()
        for job in list(self._jobs.values()):
            if job.id in self._attempts or job.state is JobState.STOPPING:
                changed |= self._check_attempt(job)
            elif job.backend not in _QUEUED_HERE and job.state in _WAITING:
                changed |= self._start_attempt(job)
        if changed or self._clock() >= self._scheduled_at + SCHEDULE_EVERY_S:
            self._schedule()
        return STEP_S if self._jobs else 2 * STEP_S

    def has_jobs(self) -> bool:
        """Return whether the store has a job that has not ended, without touching it."""
        return bool(self._store.jobs.find(states=_NOT_ENDED))

    def release(self) -> None:
        """Release the lease, so that another controller can take over."""
        self._store.leases.release(LEASE, self._holder)
        self._leased_at = 0.0

    def _is_leader(self) -> bool:
        now = self._clock()
        if now >= self._leased_at + LEASE_S / 3:
            if not self._store.leases.take(LEASE, self._holder, LEASE_S):
                self._forget()  # What another controller does meanwhile is unknown here.
                return False
            self._leased_at = now
        return True

    def _forget(self) -> None:
        self._version = None
        self._attempts.clear()

    def _refresh(self) -> bool:
        """Read the jobs again if any changed; returns whether any did."""
        version = self._store.jobs.last_change()
        if version == self._version:
            return False
        jobs = self._store.jobs.find(states=_NOT_ENDED)
        # The number was taken first: what changed since makes it another one, and is read next time.
        self._version, self._jobs = version, {job.id: job for job in reversed(jobs)}
        self._attempts = {id: attempt for id, attempt in self._attempts.items() if id in self._jobs}
        self._ended_attempts = {(id, number) for id, number in self._ended_attempts if id in self._jobs}
        specs = self._specs
        self._specs = {id: specs[id] if id in specs else self._spec(job) for id, job in self._jobs.items()}
        for job in self._jobs.values():
            if job.attempt and job.id not in self._attempts and (job.id, job.attempt) not in self._ended_attempts:
                self._adopt_attempt(job)
        return True

    def _spec(self, job: Job) -> TrainingJob | None:
        try:
            return TrainingJob.model_validate(job.spec)
        except ValueError as error:
            self._skip_job(job, error)
            return None

    def _adopt_attempt(self, job: Job) -> AttemptController | None:
        """Start to supervise the last attempt of a job, if it has not ended."""
        spec = self._specs[job.id]
        if spec is None:
            return None
        try:
            backend = self._backends[job.backend]
        except (PhalanxError, ImportError) as error:
            self._skip_job(job, error)
            return None
        attempt = AttemptController(self._store, backend, self._home, job, spec, self._clock)
        if attempt.attempt.ended is not None:
            self._ended_attempts.add((job.id, job.attempt))
            return None
        self._attempts[job.id] = attempt
        return attempt

    def _skip_job(self, job: Job, error: Exception) -> None:
        """Leave a job as it is: one that cannot be supervised must not block the others."""
        logger.error("job %s cannot be supervised: %s", job.id, error)
        self._store.jobs.explain({job.id: f"cannot be supervised: {error}"})

    def _check_attempt(self, job: Job) -> bool:
        """Check the running attempt of a job, or stop a job that has none; returns whether it ended."""
        attempt = self._attempts.get(job.id)
        try:
            if attempt is None:
                self._store.jobs.change(job.id, JobState.STOPPED, job.reason)
                return True
            if self._clock() < attempt.next_poll and not (
                job.state is JobState.STOPPING and attempt.job.state is not job.state
            ):
                return False
            if attempt.poll(job):
                del self._attempts[job.id]
                return True
        except StateError as error:
            logger.info("%s", error)  # It was stopped meanwhile: it is read again.
            self._version = None
        return False

    def _start_attempt(self, job: Job) -> bool:
        """Begin the next attempt at a job, and submit it to its backend."""
        if self._specs[job.id] is None or not self._is_leader():
            return False
        try:
            if (failure := self._backend_failure(job)) is not None:
                self._store.jobs.change(job.id, JobState.FAILED, failure.message, failure=failure)
                return True
            self._store.jobs.begin_attempt(job.id)
        except StateError as error:
            logger.info("%s", error)
            self._version = None
            return False
        job = replace(job, attempt=job.attempt + 1)
        self._jobs[job.id] = job
        return self._adopt_attempt(job) is not None and self._check_attempt(job)

    def _backend_failure(self, job: Job) -> Failure | None:
        """Return why the backend of a job cannot be used here at all."""
        try:
            self._backends[job.backend]
        except (PhalanxError, ImportError) as error:
            return submit_failure(error)
        return None

    def _schedule(self) -> None:
        """Start the jobs whose turn it is on this machine, and record why the others wait."""
        now = self._scheduled_at = self._clock()
        local = [job for job in self._jobs.values() if job.backend in _QUEUED_HERE]
        waiting, running = [], []
        for job in local:
            if (spec := self._specs[job.id]) is None:
                continue
            need = queue.needed_amount(spec, self._machine)
            if job.id in self._attempts:
                running.append(RunningJob(job.id, _owner(job), need, spec.queue))
            elif job.state in _WAITING:
                age = now - job.created.timestamp()
                waiting.append(WaitingJob(job.id, _owner(job), job.priority, age, need, spec.queue))
        if not waiting:
            return
        decision = queue.choose(waiting, running, self._machine, self._recent_usage(now), self._quotas.now())
        for id in decision.start:
            self._start_attempt(self._jobs[id])
        new_reasons = {id: reason for id, reason in decision.reasons.items() if self._jobs[id].reason != reason}
        if new_reasons:
            self._store.jobs.explain(new_reasons)
            self._jobs |= {id: replace(self._jobs[id], reason=reason) for id, reason in new_reasons.items()}

    def _recent_usage(self, now: float) -> dict[str, float]:
        if now >= self._usage_read_at + USAGE_EVERY_S:
            self._usage_read_at, since = now, datetime.fromtimestamp(now - USAGE_S, UTC)
            self._usage = {}
            for job in (*self._store.jobs.find(ended_after=since), *self._jobs.values()):
                if job.started is not None:
                    ended = job.ended.timestamp() if job.ended else now
                    ran_s = ended - max(job.started.timestamp(), now - USAGE_S)
                    self._usage[_owner(job)] = self._usage.get(_owner(job), 0.0) + ran_s
        return self._usage

    def run(self, stopped: threading.Event, *, until_idle: bool = False, lock: int | None = None) -> None:
        """Run until `stopped` is set, no job was left for IDLE_S seconds, or the file of `lock` was removed.

        Errors of the store, such as a database that restarts, are logged and retried, and so are bugs.
        """
        idle_since = self._clock()
        while not stopped.is_set():
            if lock is not None and not os.fstat(lock).st_nlink:
                logger.error("%s was removed, and its jobs with it; nothing more is started", self._home)
                stopped.set()
                return
            try:
                pause = self.step()
            except PhalanxError as error:
                logger.warning("%s", error)
                pause = LEASE_S / 3
            except Exception:
                # All jobs depend on this loop: it starts over from the store, as after a kill.
                logger.exception("the job controller starts over")
                self._forget()
                pause = LEASE_S / 3
            if not self.is_idle:
                idle_since = self._clock()
            elif until_idle and self._clock() > idle_since + IDLE_S:
                break
            stopped.wait(pause)
        self.release()


def _owner(job: Job) -> str:
    """Return whose share of the machine a job is part of."""
    return f"{job.workspace}/{job.owner}"


def run_controller(
    home: Path, controller: JobController, stopped: threading.Event, *, until_idle: bool, lock: int | None = None
) -> None:
    """Run the controller of `home` in this process, when no other process does.

    Args:
        home: The folder of all state.
        controller: The controller to run.
        stopped: Ends it.
        until_idle: Whether to return when no job is left, or no longer.
        lock: Descriptor of HOME/keeper.lock, if this process was given it locked.
    """
    while not stopped.is_set():
        with _controller_lock(home, lock) as acquired:
            if acquired is not None:
                controller.run(stopped, until_idle=until_idle, lock=acquired)
        lock = None
        # Checked after the lock was released: a process that submitted a job just before started no controller.
        if until_idle and (acquired is None or not controller.has_jobs()):
            return
        stopped.wait(1.0)


@contextlib.contextmanager
def _controller_lock(home: Path, lock: int | None) -> Iterator[int | None]:
    """The lock of the controller of `home`: the one that was inherited, or a new one from `liveness_lock`."""
    if lock is None:
        with liveness_lock(home / "keeper.lock") as taken:
            yield taken
    else:
        yield lock
        os.close(lock)


def ensure_controller(home: Path) -> None:
    """Start a controller of `home` in the background, unless there is one; it ends when no job is left."""
    with liveness_lock(home / "keeper.lock") as lock, (home / "controller.log").open("ab") as log:
        if lock is not None:
            started = subprocess.Popen(
                [sys.executable, "-m", "phalanx.jobs.control.controller", str(home.absolute()), str(lock)],
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=[lock],
            )
            # A process that lives on must reap it.
            threading.Thread(target=started.wait, daemon=True).start()


def main(home: Path, lock: int | None = None) -> None:
    """Run the controller of `home` until every job has ended."""
    from phalanx.jobs.backends.local import this_machine

    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    with JobDatabase(None, home) as store:
        run_controller(
            home, JobController(store, Backends(), home, machine=this_machine()), stopped, until_idle=True, lock=lock
        )


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
