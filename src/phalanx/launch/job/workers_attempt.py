"""`WorkersAttempt`: an attempt with parameter servers whose workers may be lost, replaced, added and taken away."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from phalanx.errors import LaunchError
from phalanx.i18n import tr
from phalanx.launch.elastic.control import read_scale
from phalanx.launch.elastic.joiners import RestartBudget
from phalanx.launch.elastic.workers.frozen_workers import FrozenWorkers
from phalanx.launch.elastic.workers.sign_off import SignOff
from phalanx.launch.elastic.workers.worker_pool import WorkerPool
from phalanx.launch.job.local_attempt import POLL_S, LocalAttempt
from phalanx.launch.job.start import Starter
from phalanx.launch.process import environment
from phalanx.launch.reports.logs import append_event
from phalanx.launch.reports.outcome import Outcome
from phalanx.launch.reports.report import describe_briefly
from phalanx.launch.reports.root_cause import ProcessExit
from phalanx.launch.request.elastic import WorkerRange
from phalanx.launch.request.topology import Process

logger = logging.getLogger("phalanx.launch")

SAME_ERROR_S = 60.0
"""Within which the same exception of a second worker is a mistake of the program rather than the loss of a worker."""


@dataclass(kw_only=True)
class WorkersAttempt(LocalAttempt):
    """Processes of one attempt; servers have the state, so that every worker may come and go."""

    limits: WorkerRange
    budget: RestartBudget
    """Pays for workers in the place of lost ones; `restarts` is for servers."""

    patience_s: float
    """How long a worker may be frozen."""

    publish: Callable[[dict[str, int], dict[str, Any]], None]
    """Called with the pids of processes and the state of the workers whenever either changes."""

    pool: WorkerPool = field(init=False)
    _sign_offs: dict[int, SignOff] = field(default_factory=dict)
    _fences: dict[int, str] = field(default_factory=dict)
    """Why workers were killed here that have not ended yet."""

    _leave_by: dict[int, float] = field(default_factory=dict)
    """By worker that was asked to leave: when it is killed."""

    _errors: dict[str, float] = field(default_factory=dict)
    _survived: list[ProcessExit] = field(default_factory=list)
    _was_budget_reported: bool = False
    _refusal: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pool = WorkerPool(limits=self.limits, budget=self.budget)
        files = environment.server_status_files(self.layout, self.facts.log_dir)
        self._workers = {process.rank: process for process in self.layout.local if process.role == "worker"}
        self._frozen = FrozenWorkers(self.patience_s, [*files.values()])

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _poll(self, timeout_s: float) -> None:
        super()._poll(timeout_s)
        if self._stopping or self.stops.pending or self._failed_at is not None:
            return
        now = time.monotonic()
        self._kill_frozen(now)
        self._settle_losses()
        self._find_missed(now)
        self._start_missing(now)
        refusals = (sign_off.refusal for sign_off in self._sign_offs.values())
        if refusal := next(filter(None, refusals), "") or self.pool.refusal(now):
            self._fail(refusal)

    def _is_training(self) -> bool:
        return super()._is_training() or self.pool.is_waiting(time.monotonic())

    def _on_spawned(self, name: str, pid: int) -> None:
        super()._on_spawned(name, pid)
        self._publish()

    def _adopt_servers(self, starter: Starter) -> None:
        super()._adopt_servers(starter)
        files = environment.server_status_files(self.layout, self.facts.log_dir)
        self._frozen = FrozenWorkers(self.patience_s, [*files.values()])

    def _publish(self) -> None:
        if self._are_all_there:
            self.publish(self._pids, self.pool.status())

    def _record(self, event: dict[str, Any]) -> None:
        append_event(self.facts.log_dir, event)
        self._publish()

    # --- losses -------------------------------------------------------------------------------------------------------

    def _fails_attempt(self, process: Process, process_exit: ProcessExit) -> bool:
        if process.role != "worker":
            return super()._fails_attempt(process, process_exit)
        worker = process.rank
        self._frozen.forget(worker)  # what servers report is older than its last word to them
        fence, deadline = self._fences.pop(worker, ""), self._leave_by.pop(worker, None)
        if not process_exit.failed:
            if (event := self.pool.finish(worker, time.time())) is not None:
                self._record(event)
            return False
        if deadline is None and self._is_repeated(process_exit):
            return True
        self._lose(worker, fence or describe_briefly(process_exit))
        self._survived.append(process_exit)
        return False

    def _restart_process(self, process: Process, process_exit: ProcessExit) -> None:
        if process.role != "worker":
            super()._restart_process(process, process_exit)
            return
        self._exits.append(process_exit)
        self._failed_at = time.monotonic()

    def _is_repeated(self, process_exit: ProcessExit) -> bool:
        """Return whether another worker ended with the same exception a moment ago."""
        if process_exit.kind != "exception":
            return False
        now = time.monotonic()
        before, self._errors[process_exit.error] = self._errors.get(process_exit.error), now
        return before is not None and now - before < SAME_ERROR_S

    def _lose(self, worker: int, how: str) -> None:
        reason = f"worker {worker} {how}"
        event = self.pool.lose(worker, reason, time.time())
        logger.warning("%s. The others continue without it: %d of %d", reason, event["ranks"], self.pool.target)
        self._sign_off(worker)
        self._record(event)

    def _sign_off(self, worker: int) -> None:
        secret = bytes.fromhex(self.facts.secret)
        self._sign_offs[worker] = SignOff(self.layout.endpoints["server"], secret, worker, self.limits.most)

    def _find_missed(self, now: float) -> None:
        """Sign off again whom servers wait for though its process has ended.

        Its script ended well without a word to them, or a server that was frozen read its `declare` after the sign-off.
        """
        if self._server_commands.busy:
            return  # a sign-off would continue at servers that the job may have no more
        for worker in self._frozen.find_awaited(now) - self.pool.running - self.pool.absent:
            logger.warning(
                "servers wait for worker %d, whose process has ended. They are told so; a script that ends early calls "
                "fleet.stop_worker()",
                worker,
            )
            self.pool.miss(worker)
            self._sign_off(worker)

    def _settle_losses(self) -> None:
        for worker in [worker for worker, sign_off in self._sign_offs.items() if sign_off.is_done]:
            if event := self.pool.sign_off(worker, self._sign_offs.pop(worker).split_push, time.time()):
                logger.warning("%s", event["reason"])
                self._record(event)
            self._frozen.forget(worker)

    def _kill_frozen(self, now: float) -> None:
        pids = {
            worker: self._pids[process.id]
            for worker, process in self._workers.items()
            if process.id in self._alive and process.id in self._pids and worker not in self._fences
        }
        for worker, why in self._frozen.look(pids, now).items():
            logger.warning(
                "worker %d (pid %d) %s. It is killed, so that it cannot come back.", worker, pids[worker], why
            )
            self._kill(worker, why)
        for worker in [worker for worker, until in self._leave_by.items() if now > until and worker in pids]:
            self._kill(worker, f"did not leave within {self.stop_grace_s:g} s")

    def _kill(self, worker: int, why: str) -> None:
        self._fences[worker] = why
        self.server.signal([self._workers[worker].id], signal.SIGKILL)

    def _start_missing(self, now: float) -> None:
        for worker in self.pool.startable(now):
            process = self._workers[worker]
            event = self.pool.start(worker, time.time(), clock=now)
            logger.info("%s: %d of %d", event["reason"], event["ranks"], self.pool.target)
            self._start(process)
            self._record(event)
        if self.pool.are_unreplaced(now) != self._was_budget_reported:
            self._was_budget_reported = not self._was_budget_reported
            if self._was_budget_reported:
                logger.warning(
                    "lost workers are not replaced now: the restart budget is used up (%s)", self.budget.limit
                )

    def _note_lingering(self) -> None:
        """Nothing: workers that left or were replaced end long before the others."""

    def _fail(self, refusal: str) -> None:
        logger.error("the job cannot continue: %s", refusal)
        self._refusal, self._failed_at = refusal, time.monotonic()
        if self._survived:
            self._survived.pop()  # the last loss is the cause

    def _end_all(self, number: int, *, may_save: bool) -> None:
        """As in every attempt, but servers are asked when the workers have sent what they hold back, and left."""
        workers = [process.id for process in self._workers.values() if process.id in self._alive]
        if may_save and number == signal.SIGTERM and workers:
            self._stopping = True
            self.server.signal(workers, number)
            until = time.monotonic() + self.stop_grace_s
            while time.monotonic() < until and not self.stops.pending and self._alive.keys() & set(workers):
                self._poll(POLL_S)
            if late := [process.title for process in self._workers.values() if process.id in self._alive]:
                # Another wait as long would end after the scheduler has killed this launcher, servers unasked.
                logger.warning(
                    "killing %s after %g s: what they hold back is lost. Set PHALANX_STOP_GRACE_S to wait longer",
                    ", ".join(late),
                    self.stop_grace_s,
                )
                self.server.signal([process.id for process in self._workers.values()], signal.SIGKILL)
        super()._end_all(number, may_save=may_save)

    def wait(self) -> Outcome:
        """As of every attempt; what the job survived is not the cause of its end."""
        try:
            outcome = super().wait()
        finally:
            for sign_off in self._sign_offs.values():
                sign_off.stop()
        outcome.exits = [process_exit for process_exit in outcome.exits if process_exit not in self._survived]
        outcome.refusal = self._refusal
        return outcome

    # --- commands -----------------------------------------------------------------------------------------------------

    def _answer(self, command: dict[str, Any]) -> str:
        if "servers" in command:
            return self._server_commands.answer(command, self._obstacle)
        if busy := self._server_commands.busy:
            raise LaunchError(busy)  # a worker cannot leave the servers meanwhile, and would be killed
        answer = self.pool.scale(read_scale(command))
        for worker in sorted(self.pool.leaving - self._leave_by.keys()):
            self._leave_by[worker] = time.monotonic() + self.stop_grace_s
            self.server.signal([self._workers[worker].id], signal.SIGTERM)
        logger.info("phalanx scale: %s", answer)
        self._publish()
        return answer

    @property
    def _obstacle(self) -> str:
        """Why the number of servers cannot change now; empty for nothing."""
        if self.pool.absent:
            return tr(
                "The servers are being told of lost workers: {workers}. Ask again when they know.",
                workers=_names(self.pool.absent),
            )
        if self._leave_by:
            return tr(
                "Workers were asked to leave: {workers}. Ask again when they have left.", workers=_names(self._leave_by)
            )
        return ""


def _names(workers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(workers)))
