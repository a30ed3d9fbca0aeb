"""`WatchedRank`: what a launcher remembers of one process from tick to tick: its progress, and since when it waits."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from phalanx.launch.hang.observe import IDLE_CPU, Watched
from phalanx.launch.hang.processes import state_of
from phalanx.launch.process.usage import ProcessUsage
from phalanx.launch.rank.activity import Activity, ActivityReader

USUAL_STEPS = 3.0
"""How many of its usual steps a rank may take beyond the seconds that the user gives."""

_WORKS_CPU = 0.005
"""Part of a core above which a rank that is waited for may come: a slow download uses it, who sleeps does not."""


@dataclass
class WatchedRank:
    """A process, and its progress."""

    process: Watched
    reader: ActivityReader | None = None
    activity: Activity | None = None
    cpu_ns: int = 0
    at: float = 0.0
    works: bool = False
    """Whether its main thread used its processor since the last tick."""

    usage: ProcessUsage | None = None
    """What it and all it started had used at the last tick, once others wait for it."""

    idle_since: float = 0.0
    progress: tuple[int, int, int] = (0, 0, 0)

    def observe(self, now: float) -> None:
        """Take what has changed since the last tick."""
        state = state_of(self.process.pid)
        if self.reader is None:
            with contextlib.suppress(OSError):
                self.reader = ActivityReader(self.process.pid)
        if self.reader is not None:
            self.activity = self.reader.read() or self.activity
        share = (state.cpu_ns - self.cpu_ns) / 1e9 / max(now - self.at, 1e-3)
        self.works = share >= _WORKS_CPU
        self.cpu_ns, self.at = state.cpu_ns, now
        progress = self.activity.progress if self.activity is not None else self.progress
        if share >= IDLE_CPU or progress != self.progress or not self.idle_since:
            self.idle_since = now
        self.progress = progress

    def has_worked(self, tick_s: float) -> bool:
        """Whether it, or anything that it started, did something since the last tick."""
        before, self.usage = self.usage, ProcessUsage.measure(self.process.pid)
        return self.works or before is None or bool(self.usage.describe_since(before, tick_s))

    def waited_s(self, now: float) -> float:
        """How long this rank has been in one call, or has not used its processor."""
        calls = self.activity.calls if self.activity is not None else ()
        return max([now - self.idle_since, *(now - call.since for call in calls)])

    @property
    def usual_s(self) -> float:
        """How long it may take beyond the seconds that the user gives."""
        return USUAL_STEPS * self.activity.step_s if self.activity is not None else 0.0

    @property
    def is_starting(self) -> bool:
        """Whether it makes its first steps, or has not said anything yet."""
        return self.activity is None or self.activity.is_starting

    def has_moved(self, before: tuple[int, ...], since: float) -> bool:
        """Whether it continues after a wait: its counts say so, or, if it waited for something else, its processor."""
        return self.progress != before if before else self.idle_since > since
