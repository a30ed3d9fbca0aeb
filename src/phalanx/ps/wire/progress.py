"""`WorkProgress` and `Startup`: what a server that does not answer yet tells the clients that wait for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from phalanx.errors import InternalError, PhalanxError

WORK_REPORT_S = 5.0
"""Seconds between two reports to a client of how far the work is that it waits for."""


class WorkProgress:
    """How far a long work is. One thread does the work; any may read.

    Args:
        verb: What the server does, as `recovers`.
        changed: Called with this after every sign of progress, in the thread that works.
    """

    def __init__(self, verb: str, changed: Callable[[WorkProgress], None] = lambda progress: None) -> None:
        self._verb, self._changed = verb, changed
        self._started = self._part_started = self.changed_at = time.monotonic()
        self._total, self._unit = 0, ""
        self.done = 0
        """Of the part under way."""

    def expect(self, total: int, unit: str) -> None:
        """Begin a part of the work: so many `rows`, `bytes of the log`, ..."""
        self._total, self._unit, self.done = total, unit, 0
        self._part_started = self.changed_at = time.monotonic()

    def add(self, count: int) -> None:
        """Note that so much more of the part is done; 0 is no progress."""
        self.done += count
        if count:
            self.changed_at = time.monotonic()
        self._changed(self)

    def describe(self) -> str:
        """Return a verb with what follows: `recovers: 41 % of 68,000,000 rows after 25 s, about 36 s to go`."""
        now = time.monotonic()
        share = self.done / self._total if self._total else 0.0
        part = f"{min(share, 1.0):.0%}".replace("%", " %") + f" of {self._total:,} {self._unit} " if self._total else ""
        left = f", about {(now - self._part_started) * (1 / share - 1):.0f} s to go" if 0 < share <= 1 else ""
        return f"{self._verb}: {part}after {now - self._started:.0f} s{left}"


class WorkReporter:
    """Tells one listener how far a work is.

    Args:
        tell: Takes the description, and whether there was progress since the last one.
        every_s: Seconds between two reports of `report_if_due`.
    """

    def __init__(self, tell: Callable[[str, bool], None], every_s: float = WORK_REPORT_S) -> None:
        self._tell, self._every_s = tell, every_s
        self._reported_at = time.monotonic()

    def report(self, progress: WorkProgress) -> None:
        """Tell it now."""
        has_moved = progress.changed_at > self._reported_at
        self._reported_at = time.monotonic()
        self._tell(progress.describe(), has_moved)

    def report_if_due(self, progress: WorkProgress) -> None:
        """Tell it if the last report is long ago."""
        if time.monotonic() - self._reported_at >= self._every_s:
            self.report(progress)


class Startup:
    """What a server does before it answers; as a context it ends with the block, and fails with the block's error.

    Args:
        progress: How far it is.
    """

    def __init__(self, progress: WorkProgress) -> None:
        self.progress = progress
        self.failure: PhalanxError | None = None
        """Why the server will not answer."""

        self._over = threading.Event()

    @classmethod
    def immediate(cls) -> Startup:
        """Return that of a server which answers at once."""
        startup = cls(WorkProgress("starts"))
        startup._over.set()
        return startup

    def wait(self, seconds: float) -> bool:
        """Wait until it is over, at most so long; returns whether it is."""
        return self._over.wait(seconds)

    def __enter__(self) -> Startup:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if isinstance(error, PhalanxError):
            self.failure = error
        elif error is not None:
            self.failure = InternalError(f"The server failed before it could answer: {error!r}. Its log has more.")
        self._over.set()
