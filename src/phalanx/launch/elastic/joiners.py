"""`Joiners`, `RestartBudget`: start processes that join an elastic job, as often as it may; end those too many."""

from __future__ import annotations

import logging
import signal
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from phalanx.launch.elastic.nodes.node_group import NodeGroup
from phalanx.launch.elastic.rank_host import RankHost

logger = logging.getLogger("phalanx.launch")

WINDOW_S = 600.0
DEFAULT_IN_WINDOW = 3
"""Replacements within `WINDOW_S` unless --max-restarts says how many there may be in all."""


@dataclass
class RestartBudget:
    """Counts replacements: `total` in all, or, where that is None, `DEFAULT_IN_WINDOW` within `WINDOW_S`."""

    total: int | None
    max_restarts: int = 0
    """What --max-restarts allows in all, of whole restarts too."""

    _times: deque[float] = field(default_factory=deque)

    def remaining(self, now: float) -> int:
        """Return how many ranks may be replaced at `now`."""
        if self.total is not None:
            return self.total
        while self._times and now - self._times[0] >= WINDOW_S:
            self._times.popleft()
        return DEFAULT_IN_WINDOW - len(self._times)

    def spend(self, now: float) -> None:
        """Count one replacement."""
        if self.total is not None:
            self.total -= 1
        self._times.append(now)

    @property
    def limit(self) -> str:
        """The limit in words."""
        if self.total is not None:
            return f"all {self.max_restarts} of --max-restarts {self.max_restarts} are used"
        return f"{DEFAULT_IN_WINDOW} in {WINDOW_S / 60:g} minutes; --max-restarts changes it"


@dataclass
class Joiners:
    """Those of one node."""

    group: NodeGroup
    budget: RestartBudget
    rank_host: RankHost
    next_id: int
    """Number of the next process that is started here."""

    _unreplaced: int = 0
    """Lost ranks that were not replaced yet."""

    _warned_unreplaced: int = 0
    _dismissed: set[str] = field(default_factory=set)

    def note_loss(self) -> None:
        """Count a rank that is to be replaced, which the budget pays for."""
        self._unreplaced += 1

    def forget_losses(self) -> None:
        """Let the next processes be what somebody asked for, and replace nothing."""
        self._unreplaced = 0

    def is_dismissed(self, member_id: str) -> bool:
        """Return whether a process was ended here."""
        return member_id in self._dismissed

    def start_missing(self, running: Collection[str], now: float) -> None:
        """Start as many processes as this node should have more.

        Args:
            running: Processes of this node that have not ended.
            now: On the monotonic clock.
        """
        membership = self.group.membership
        starting = [member_id for member_id in running if member_id not in membership.members]
        missing = membership.missing(self.group.node) - len(starting)
        # Who leaves or is killed has its device until it has ended.
        for _ in range(min(missing, self.rank_host.free_slots)):
            if self._unreplaced > 0:
                if self.budget.remaining(now) <= 0:
                    self._note_spent_budget()
                    return
                self.budget.spend(now)
                self._unreplaced -= 1
            self.rank_host.start_joiner(f"n{self.group.node}.{self.next_id}")
            self.next_id += 1

    def _note_spent_budget(self) -> None:
        """Say once that ranks are missing, until one could be replaced again."""
        if self._unreplaced != self._warned_unreplaced:
            self._warned_unreplaced = self._unreplaced
            logger.warning("lost ranks are not replaced now: the restart budget is used up (%s)", self.budget.limit)

    def dismiss_surplus(self, running: Collection[str]) -> None:
        """End joiners that are not needed any more."""
        self._dismiss(self.group.membership.surplus_joiners(self.group.node), running)

    def dismiss_stranded(self, running: Collection[str], initial: Collection[str]) -> None:
        """End joiners of a view of which all others have finished: nobody is left who has the state of the job."""
        membership = self.group.membership
        active = membership.active
        if membership.has_finished and not any(i in membership.took_up or i in initial for i in active):
            own = [i for i in active if i in running]
            for member_id in own:
                self.group.record("finish", member_id)
            self._dismiss(own, running)

    def _dismiss(self, member_ids: Sequence[str], running: Collection[str]) -> None:
        unneeded = [i for i in member_ids if i not in self._dismissed and i in running]
        if unneeded:
            self._dismissed.update(unneeded)
            self.rank_host.signal_members(unneeded, signal.SIGKILL)
