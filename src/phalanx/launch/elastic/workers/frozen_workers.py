"""`FrozenWorkers`: workers beside parameter servers that are frozen: stopped, or idle while servers wait for them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from phalanx.cluster.view import Member
from phalanx.launch.elastic.suspects import Suspects
from phalanx.launch.process.usage import stopped_state

LOOK_S = 0.25
"""Between two looks at the states of processes."""

STATUS_S = 1.0
"""Between two looks at what servers report; they do so every two seconds."""

_STALE_S = 6.0
"""Age after which the status of a server counts for nothing: three times as long as between two."""

PATIENCE_S = 2.0
"""Seconds that a worker may be stopped, or waited for, unless PHALANX_PATIENCE_S says."""


class FrozenWorkers:
    """Those of one attempt.

    Args:
        patience_s: How long a worker may be stopped before it counts as frozen, or waited for before it is looked at.
        status_files: Where servers report whom requests wait for.
    """

    def __init__(self, patience_s: float, status_files: Iterable[str]) -> None:
        self._patience_s, self._status_files = patience_s, tuple(status_files)
        self._suspects = Suspects()
        self._stopped: dict[int, float] = {}
        self._awaited: dict[tuple[int, int], float] = {}
        self._next_look = self._next_status = 0.0

    def look(self, pids: Mapping[int, int], now: float) -> dict[int, str]:
        """Return the workers that are frozen, and why.

        Args:
            pids: Processes by worker, of those that run.
            now: On the monotonic clock.
        """
        if now < self._next_look:
            return {}
        self._next_look = now + LOOK_S
        reasons = self._find_stopped(pids, now)
        if now >= self._next_status:
            self._next_status = now + STATUS_S
            self._suspect_awaited(pids, now)
        for verdict in self._suspects.verdicts(now):
            worker = int(verdict.member.id)
            is_awaited = any(awaited == worker for awaited, _ in self._awaited)
            if verdict.is_frozen and is_awaited and pids.get(worker) == verdict.member.pid:
                reasons.setdefault(worker, verdict.why)
        return reasons

    def find_awaited(self, now: float) -> set[int]:
        """Return the workers, running or not, for which servers have waited longer than a report of theirs is old."""
        return {worker for (worker, _), since in self._awaited.items() if now - since > _STALE_S}

    def forget(self, worker: int) -> None:
        """Count anew how long servers wait for a worker: they were told that it is gone."""
        self._awaited = {wait: since for wait, since in self._awaited.items() if wait[0] != worker}

    def _find_stopped(self, pids: Mapping[int, int], now: float) -> dict[int, str]:
        states = {worker: stopped_state(pid) for worker, pid in pids.items()}
        self._stopped = {w: self._stopped.get(w, now) for w, state in states.items() if state.startswith("stopped")}
        return {
            worker: f"is frozen: {states[worker]} for {now - since:.1f} s"
            for worker, since in self._stopped.items()
            if now - since >= self._patience_s
        }

    def _suspect_awaited(self, pids: Mapping[int, int], now: float) -> None:
        """Open a case for each worker that servers have waited for, at the same step, for as long as the patience."""
        waits = {wait for path in self._status_files for wait in read_awaited(path)}
        self._awaited = {wait: self._awaited.get(wait, now) for wait in waits}
        for (worker, _), since in self._awaited.items():
            if worker in pids and now - since >= self._patience_s:
                member = Member(id=str(worker), host="", pid=pids[worker], log="", node=0)
                self._suspects.suspect(member, "servers", now - since, now)


def read_awaited(path: str) -> list[tuple[int, int]]:
    """Return (worker, its pushes) of those whom requests of a server wait for; nothing where it does not say lately."""
    try:
        status = json.loads(Path(path).read_bytes())
        if time.time() - status["time"] > _STALE_S:
            return []  # the server is away, and its workers wait for it
        return [(int(worker), int(pushes)) for worker, pushes in status["awaited"]]
    except (OSError, ValueError, TypeError, KeyError):
        return []  # it has not reported yet, or a script wrote there
