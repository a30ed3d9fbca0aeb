"""`WorkerPool`: which workers beside parameter servers run, which are to be started or to leave (pure).

A worker keeps its number, and with it the count of its pushes on the servers; whoever takes a lost one's place has the
same number. Servers have the state, so any worker may be lost, and one that starts needs no other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from phalanx.errors import LaunchError
from phalanx.launch.elastic.joiners import RestartBudget
from phalanx.launch.elastic.workers.sign_off import SplitPush
from phalanx.launch.request.elastic import WorkerRange


@dataclass(kw_only=True)
class WorkerPool:
    """The workers of one attempt, by number; it begins with as many as there may be."""

    limits: WorkerRange
    budget: RestartBudget
    epoch: int = 0
    """Changes of the workers so far."""

    target: int = field(init=False)
    """Workers that there should be, those that have finished included."""

    running: set[int] = field(init=False)
    finished: set[int] = field(default_factory=set)
    """Workers whose scripts have ended well."""

    leaving: set[int] = field(default_factory=set)
    """Workers that were asked to leave and still run."""

    absent: set[int] = field(default_factory=set)
    """Lost workers of which the servers were not told yet."""

    events: list[dict[str, Any]] = field(default_factory=list)
    _unreplaced: int = 0

    def __post_init__(self) -> None:
        self.target = self.limits.most
        self.running = set(range(self.limits.most))

    # --- what happened ------------------------------------------------------------------------------------------------

    def finish(self, worker: int, now: float) -> dict[str, Any] | None:
        """Take notice that a worker's script ended well; returns the event if it left because it was asked to."""
        self.running.discard(worker)
        if worker not in self.leaving:
            self.finished.add(worker)
            return None
        self.leaving.discard(worker)
        return self._note(now, f"worker {worker} left", left=[worker])

    def lose(self, worker: int, reason: str, now: float) -> dict[str, Any]:
        """Take notice that a worker's process is gone; returns the event."""
        self.running.discard(worker)
        self.absent.add(worker)
        if worker not in self.leaving:
            self._unreplaced += 1
        self.leaving.discard(worker)
        return self._note(now, reason, lost=[worker])

    def miss(self, worker: int) -> None:
        """Take notice that servers still count a worker that does not run."""
        self.absent.add(worker)

    def sign_off(self, worker: int, split: SplitPush | None = None, now: float = 0.0) -> dict[str, Any] | None:
        """Take notice that the servers know of a loss; returns the event if some of them alone have its last push."""
        self.absent.discard(worker)
        if split is None:
            return None
        have, lack = (" and ".join(f"server {s}" for s in servers) for servers in (split.servers, split.others))
        event = {
            "time": round(now, 3),
            "kind": "split_push",
            "worker": worker,
            "push": split.push,
            "servers": split.servers,
            "missing": split.others,
            "reason": f"push {split.push} of worker {worker} is in the tables of {have} and not in those of {lack}: "
            "the worker was lost while it sent it. Training continues, and the tables keep that difference",
        }
        self.events.append(event)
        return event

    def start(self, worker: int, now: float, *, clock: float) -> dict[str, Any]:
        """Take notice that a worker is started; returns the event.

        Args:
            worker: One of `startable`.
            now: Seconds since the epoch.
            clock: On the monotonic clock, by which replacements are counted.
        """
        why = f"worker {worker} joins"
        if self._unreplaced:
            self._unreplaced -= 1
            self.budget.spend(clock)
            why = f"worker {worker} takes the place of a lost one"
        self.running.add(worker)
        self.finished.discard(worker)
        return self._note(now, why, joined=[worker])

    def scale(self, size: int) -> str:
        """Change how many workers there should be; returns what follows, in words.

        Raises:
            LaunchError: If the job may not have so many.
        """
        if not self.limits.least <= size <= self.limits.most:
            raise LaunchError(
                f"Asked for {size} workers, and the job was started with --worker-num {self.limits.least}:"
                f"{self.limits.most}. Give a number in that range."
            )
        before, self.target, self._unreplaced = self.target, size, 0
        surplus = len(self.finished) + len(self._active) - size
        if surplus > 0:
            self.leaving |= set(sorted(self._active)[-surplus:])
        return f"{size} workers instead of {before}"

    # --- what follows -------------------------------------------------------------------------------------------------

    @property
    def _active(self) -> set[int]:
        return self.running - self.leaving

    def startable(self, clock: float) -> list[int]:
        """Return the workers to start now, lowest first: not before servers have signed off the lost one."""
        missing = self.target - len(self.finished) - len(self._active) - self._held_back(clock)
        free = [w for w in range(self.limits.most) if w not in self.running | self.absent | self.finished]
        return free[: max(missing, 0)]

    def _held_back(self, clock: float) -> int:
        """Return how many lost workers the budget does not pay for now."""
        return max(self._unreplaced - max(self.budget.remaining(clock), 0), 0)

    def are_unreplaced(self, clock: float) -> bool:
        """Return whether lost workers are not replaced because the budget is used up."""
        return self._held_back(clock) > 0

    def is_waiting(self, clock: float) -> bool:
        """Return whether the job continues though no worker may run: one is signed off, or is to be started."""
        return bool(self.absent) or bool(self.startable(clock))

    def refusal(self, clock: float) -> str:
        """Return why the job cannot continue; empty while it can."""
        left = len(self._active) + len(self.finished)
        may_come = self.target - left - self._held_back(clock)
        if left + max(may_come, 0) >= self.limits.least:
            return ""
        return f"{left} of at least {self.limits.least} workers are left, and {self.budget.limit}"

    def status(self) -> dict[str, Any]:
        """Return what `phalanx ps` shows."""
        return {
            "noun": "workers",
            "epoch": self.epoch,
            "least": self.limits.least,
            "most": self.limits.most,
            "target": self.target,
            "members": [{"rank": w, "id": f"worker {w}"} for w in sorted(self.running)],
            "joiners": [],
            "events": self.events[-5:],
        }

    def _note(
        self, now: float, reason: str, lost: list[int] | None = None, joined: list[int] | None = None,
        left: list[int] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        self.epoch += 1
        event = {
            "time": round(now, 3),
            "kind": "epoch",
            "epoch": self.epoch,
            "step": None,
            "ranks": len(self.running),
            "planned": not lost,
            "reason": reason,
            "lost": [f"worker {w}" for w in lost or ()],
            "joined": [f"worker {w}" for w in joined or ()],
            "left": [f"worker {w}" for w in left or ()],
            "seconds": {},
            "redone": 0,
        }
        self.events.append(event)
        return event
