"""`SlowWatch`: a thread of the launcher that adds up where the ranks of this host lose their time.

A look at every tick costs a few reads of /proc and of the ranks' activity, about 0.3 ms a rank and second. The ranks
themselves are not asked.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from phalanx.launch.hang.observe import Watched
from phalanx.launch.rank.activity import ActivityReader
from phalanx.launch.slow.counters import RankCounters, Reading
from phalanx.launch.slow.stragglers import Losses, find_losses
from phalanx.launch.slow.time_spent import RankName, TimeSpent, named_waits, rename_ranks, spent_between, sum_of

WINDOW_S = 10.0
"""Who is late is asked for stretches of this length."""

RECENT = 6
"""How many of them tell what is the matter now."""

logger = logging.getLogger("phalanx.launch")

_TICK_S = 0.2
_READ_S = 1.0


@dataclass
class _Rank:
    """What the watch remembers of one process."""

    number: int
    name: RankName
    """What its time is added to: in an elastic job its number may be another's later."""

    counters: RankCounters
    pid: int
    reader: ActivityReader | None = None
    first: Reading | None = None
    """At the beginning of the window."""

    last: Reading | None = None

    def read(self, now: float) -> None:
        """Take a reading, unless the process is gone or has said nothing yet."""
        if self.reader is None:
            with contextlib.suppress(OSError):
                self.reader = ActivityReader(self.pid)
        activity = self.reader.read() if self.reader is not None else None
        if activity is not None and (reading := self.counters.read(now, activity)) is not None:
            self.last = reading

    @property
    def is_starting(self) -> bool:
        """Whether it makes its first steps: that others wait for it meanwhile is no news."""
        return self.last is None or self.last.activity.is_starting


@dataclass
class SlowWatch:
    """Watches the ranks of an attempt on this host.

    Args:
        min_share: Part of the time from which a loss is worth a word; 0 for no watch.
        has_other_hosts: Whether the job has ranks on other hosts.
    """

    min_share: float
    has_other_hosts: bool = False
    started: float = field(default_factory=time.monotonic)
    _ranks: list[_Rank] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _news: queue.SimpleQueue[Losses] = field(default_factory=queue.SimpleQueue)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _began: float = 0.0
    """When the first window began."""

    _window_began: float = 0.0
    _whole: dict[RankName, TimeSpent] = field(default_factory=dict)
    _recent: deque[dict[RankName, TimeSpent]] = field(default_factory=lambda: deque(maxlen=RECENT))

    def watch(self, processes: Sequence[Watched]) -> None:
        """Watch these processes from now on, and no others; called again where the members of a job change."""
        if not self.min_share:
            return
        titles = [(process, process.title.rpartition(" ")[2]) for process in processes if process.role == "worker"]
        with self._lock:
            self._close_window()
            self._ranks = [
                _Rank(int(number), process.member or int(number), RankCounters(process.pid), process.pid)
                for process, number in titles
                if number.isdigit()
            ]
        if self._thread is None and self._ranks:
            self._thread = threading.Thread(target=self._run, name="slow watch", daemon=True)
            self._thread.start()

    def take(self) -> Losses | None:
        """Return what was lost of late, if it was looked at since the last call."""
        try:
            return self._news.get_nowait()
        except queue.Empty:
            return None

    def stop(self) -> Losses:
        """End the watch; return what was lost since the first steps."""
        self._stopped.set()
        with self._lock:
            self._close_window()
            return self._losses(self._whole)

    @property
    def start_s(self) -> float:
        """Seconds until the first steps were made."""
        return (self._began or time.monotonic()) - self.started

    def _losses(self, spent: dict[RankName, TimeSpent]) -> Losses:
        return find_losses(spent, self.min_share, has_other_hosts=self.has_other_hosts)

    def _run(self) -> None:
        before = next_read = time.monotonic()
        while not self._stopped.wait(_TICK_S):
            now = time.monotonic()
            try:
                with self._lock:
                    self._tick(now - before, is_due=now >= next_read)
            except Exception:  # a job must not end for what is said of it
                logger.exception("the watch for slow ranks failed, and ends")
                return
            if now >= next_read:
                next_read = now + _READ_S
            before = now

    def _tick(self, seconds: float, *, is_due: bool) -> None:
        for rank in self._ranks:
            rank.counters.sample_state(seconds)
        if not is_due:
            return
        now = time.monotonic()
        for rank in self._ranks:
            rank.read(now)
        if not self._ranks or any(rank.is_starting for rank in self._ranks):
            return
        if not self._window_began:
            self._open_window(now)
        elif now - self._window_began >= WINDOW_S:
            self._close_window()
            self._news.put(self._losses(sum_of(self._recent)))
            self._open_window(now)

    def _open_window(self, now: float) -> None:
        self._began = self._began or now
        self._window_began = now
        for rank in self._ranks:
            rank.counters.refresh()
            rank.read(now)  # of the groups that it is in now
            rank.first = rank.last

    def _close_window(self) -> None:
        """Add what the ranks spent the window on; of those that have ended, up to then."""
        names = {rank.number: rank.name for rank in self._ranks}
        pairs = [(rank.name, rank.first, rank.last) for rank in self._ranks]
        spent = {
            name: rename_ranks(spent_between(first, last), names)
            for name, first, last in pairs
            if first is not None and last is not None and last.at > first.at
        }
        self._window_began = 0.0
        if spent:
            named = named_waits(spent)
            self._recent.append(named)
            self._whole = sum_of([self._whole, named])
