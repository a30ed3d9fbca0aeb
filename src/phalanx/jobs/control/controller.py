"""The job controller: the one loop that moves jobs from state to state, in its own process or in a server's.

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
from phalanx.jobs.attempt.failures import submit_failure
from phalanx.jobs.backend import Backend
from phalanx.jobs.control.attempt_controller import LOCAL_EVERY_S, AttemptController
from phalanx.jobs.control.job_state_store import JobStateStore
from phalanx.jobs.models import Failure, Job
from phalanx.jobs.scheduling import queue
from phalanx.jobs.scheduling.queue import Amount, Running, Waiting
from phalanx.jobs.scheduling.quotas import Quotas
from phalanx.jobs.sources.file_lock import try_lock
from phalanx.jobs.spec import TrainingJob
from phalanx.jobs.states import JobState

logger = logging.getLogger("phalanx.jobs")

LEASE = "keeper"
LEASE_S = 15.0
"""After which the controller of another home takes over from one that says nothing."""

QUEUE_EVERY_S = 10.0
"""How often the line is looked at when nothing changed: jobs grow older in it."""

SHARE_S = 86400.0
"""Whose jobs ran longer during this time stands further back."""

SHARE_EVERY_S = 60.0
IDLE_S = 5.0
"""How long a background controller stays when nothing is left."""

_LIVE = tuple(state for state in JobState if not state.is_terminal)
_WAITING = (JobState.QUEUED, JobState.RESTARTING)


class JobController:
    """Looks after every job that has not ended. All it must remember is in the store; the rest is to be quick."""

    def __init__(
        self,
        ledger: JobStateStore,
        backends: Mapping[str, Backend],
        home: Path,
        *,
        machine: Amount,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Make a controller; nothing happens before its first `step`.

        Args:
            ledger: The store.
            backends: Engines by name. Who starts on `local` is decided here, the others have queues of their own.
            home: The folder of all state.
            machine: What `local` has to give.
            clock: Seconds since the epoch.
        """
        self._ledger, self._backends, self._home = ledger, backends, home
        self._machine, self._clock = machine, clock
        self._quotas = Quotas(home / "queues.yaml")
        self._holder = f"{os.uname().nodename}:{home}"
        self._leased = self._looked_at_line = self._shared = 0.0
        self._version: Any = None
        self._jobs: dict[str, Job] = {}
        self._live: dict[str, AttemptController] = {}
        self._specs: dict[str, TrainingJob | None] = {}
        self._over: set[tuple[str, int]] = set()
        self._used: dict[str, float] = {}

    @property
    def is_idle(self) -> bool:
        """Whether every job had ended at the last step."""
        return not self._jobs

    def step(self) -> float:
        """Do everything that is due; return for how many seconds nothing will be.

        Returns at once, with nothing done, while the controller of another home has the lease.
        """
        if not self._is_leader():
            return LEASE_S / 3
        changed = self._refresh()
        for job in list(self._jobs.values()):
            if job.id in self._live or job.state is JobState.STOPPING:
                changed |= self._attend(job)
            elif job.backend != "local" and job.state in _WAITING:
                changed |= self._begin(job)
        if changed or self._clock() >= self._looked_at_line + QUEUE_EVERY_S:
            self._serve_line()
        return LOCAL_EVERY_S if self._jobs else 2 * LOCAL_EVERY_S

    def anything_left(self) -> bool:
        """Return whether the store has a job that has not ended, without touching it."""
        return bool(self._ledger.jobs(states=_LIVE))

    def release(self) -> None:
        """Let another controller go on."""
        self._ledger.release(LEASE, self._holder)
        self._leased = 0.0

    def _is_leader(self) -> bool:
        now = self._clock()
        if now >= self._leased + LEASE_S / 3:
            if not self._ledger.lease(LEASE, self._holder, LEASE_S):
                self._forget()  # What another controller does meanwhile is not known here.
                return False
            self._leased = now
        return True

    def _forget(self) -> None:
        self._version = None
        self._live.clear()

    def _refresh(self) -> bool:
        """Read the jobs again if any changed; returns whether any did."""
        version = self._ledger.last_change()
        if version == self._version:
            return False
        jobs = self._ledger.jobs(states=_LIVE)
        # The number was taken first: what changed since makes it another one, and is read next time.
        self._version, self._jobs = version, {job.id: job for job in reversed(jobs)}
        self._live = {id: live for id, live in self._live.items() if id in self._jobs}
        self._over = {(id, number) for id, number in self._over if id in self._jobs}
        specs = self._specs
        self._specs = {id: specs[id] if id in specs else self._spec(job) for id, job in self._jobs.items()}
        for job in self._jobs.values():
            if job.attempt and job.id not in self._live and (job.id, job.attempt) not in self._over:
                self._care(job)
        return True

    def _spec(self, job: Job) -> TrainingJob | None:
        try:
            return TrainingJob.model_validate(job.spec)
        except ValueError as error:
            self._give_up_on(job, error)
            return None

    def _care(self, job: Job) -> AttemptController | None:
        """Take the last attempt of a job into care, if it has not ended."""
        spec = self._specs[job.id]
        if spec is None:
            return None
        try:
            backend = self._backends[job.backend]
        except (PhalanxError, ImportError) as error:
            self._give_up_on(job, error)
            return None
        live = AttemptController(self._ledger, backend, self._home, job, spec, self._clock)
        if live.attempt.ended is not None:
            self._over.add((job.id, job.attempt))
            return None
        self._live[job.id] = live
        return live

    def _give_up_on(self, job: Job, error: Exception) -> None:
        """Leave a job as it is: one that cannot be looked after must not keep the others waiting."""
        logger.error("job %s cannot be looked after: %s", job.id, error)
        self._ledger.explain({job.id: f"cannot be looked after: {error}"})

    def _attend(self, job: Job) -> bool:
        """Look after the live attempt of a job, or stop one that has none; returns whether it ended."""
        live = self._live.get(job.id)
        try:
            if live is None:
                self._ledger.change(job.id, JobState.STOPPED, job.reason)
                return True
            if self._clock() < live.next_look and not (
                job.state is JobState.STOPPING and live.job.state is not job.state
            ):
                return False
            if live.look(job):
                del self._live[job.id]
                return True
        except StateError as error:
            logger.info("%s", error)  # Somebody stopped it meanwhile: it is read again.
            self._version = None
        return False

    def _begin(self, job: Job) -> bool:
        """Begin the next attempt at a job, and hand it over."""
        if self._specs[job.id] is None or not self._is_leader():
            return False
        try:
            if (failure := self._missing(job)) is not None:
                self._ledger.change(job.id, JobState.FAILED, failure.message, failure=failure)
                return True
            self._ledger.begin_attempt(job.id)
        except StateError as error:
            logger.info("%s", error)
            self._version = None
            return False
        job = replace(job, attempt=job.attempt + 1)
        self._jobs[job.id] = job
        return self._care(job) is not None and self._attend(job)

    def _missing(self, job: Job) -> Failure | None:
        """Return why the engine of a job cannot be used here at all."""
        try:
            self._backends[job.backend]
        except (PhalanxError, ImportError) as error:
            return submit_failure(error)
        return None

    def _serve_line(self) -> None:
        """Start the jobs whose turn it is on this machine, and tell the others why they wait."""
        now = self._looked_at_line = self._clock()
        local = [job for job in self._jobs.values() if job.backend == "local"]
        waiting, running = [], []
        for job in local:
            if (spec := self._specs[job.id]) is None:
                continue
            need = queue.need_of(spec, self._machine)
            if job.id in self._live:
                running.append(Running(job.id, _owner(job), need, spec.queue))
            elif job.state in _WAITING:
                age = now - job.created.timestamp()
                waiting.append(Waiting(job.id, _owner(job), job.priority, age, need, spec.queue))
        if not waiting:
            return
        chosen = queue.choose(waiting, running, self._machine, self._used_lately(now), self._quotas.now())
        for id in chosen.start:
            self._begin(self._jobs[id])
        new = {id: reason for id, reason in chosen.reasons.items() if self._jobs[id].reason != reason}
        if new:
            self._ledger.explain(new)
            self._jobs |= {id: replace(self._jobs[id], reason=reason) for id, reason in new.items()}

    def _used_lately(self, now: float) -> dict[str, float]:
        if now >= self._shared + SHARE_EVERY_S:
            self._shared, since = now, datetime.fromtimestamp(now - SHARE_S, UTC)
            self._used = {}
            for job in (*self._ledger.jobs(ended_after=since), *self._jobs.values()):
                if job.started is not None:
                    ended = job.ended.timestamp() if job.ended else now
                    ran = ended - max(job.started.timestamp(), now - SHARE_S)
                    self._used[_owner(job)] = self._used.get(_owner(job), 0.0) + ran
        return self._used

    def run(self, stopped: threading.Event, *, until_idle: bool = False, lock: int | None = None) -> None:
        """Keep until `stopped` is set, no job was left for IDLE_S seconds, or the file of `lock` was removed.

        An error of the store, such as a database that is being restarted, is logged and waited out, and so is a bug.
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
                # Everybody's jobs hang on this loop: it starts over from the store, as after a kill.
                logger.exception("the controller starts over")
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
    """Keep the jobs of `home` in this process, when no other does.

    Args:
        home: The folder of all state.
        controller: What keeps.
        stopped: Ends it.
        until_idle: Whether to return when no job is left, or no longer.
        lock: Descriptor of HOME/keeper.lock, if this process was given it locked.
    """
    while not stopped.is_set():
        with _ours(home, lock) as taken:
            if taken is not None:
                controller.run(stopped, until_idle=until_idle, lock=taken)
        lock = None
        # Asked after the lock was let go: who submitted a job just before found a controller here, and started none.
        if until_idle and (taken is None or not controller.anything_left()):
            return
        stopped.wait(1.0)


@contextlib.contextmanager
def _ours(home: Path, lock: int | None) -> Iterator[int | None]:
    """The lock of the controller of `home`: the one that was handed over, or as `try_lock` has it."""
    if lock is None:
        with try_lock(home / "keeper.lock") as taken:
            yield taken
    else:
        yield lock
        os.close(lock)


def ensure_controller(home: Path) -> None:
    """Start a controller of `home` in the background, unless there is one; it ends when no job is left."""
    with try_lock(home / "keeper.lock") as lock, (home / "controller.log").open("ab") as log:
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
            # In a process that stays, somebody must take note of its end.
            threading.Thread(target=started.wait, daemon=True).start()


def main(home: Path, lock: int | None = None) -> None:
    """Keep the jobs of `home` until none is left."""
    from phalanx.jobs.backends import Backends
    from phalanx.jobs.backends.local import this_machine
    from phalanx.jobs.store import JobStore

    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    with JobStore(None, home) as store:
        run_controller(
            home, JobController(store, Backends(), home, machine=this_machine()), stopped, until_idle=True, lock=lock
        )


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
