"""`HangWatch`: a thread of the launcher that sees when the job is stalled, and finds out why.

Each tick costs a few reads of /proc and of the ranks' activity. Stacks are read only when a rank has been in
one call, or without a use of its processor, for longer than is usual.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from phalanx.launch.hang.observe import Observation, Watched, observe
from phalanx.launch.hang.probes import UNREADABLE, JobProbe, ProbeChannel, merge_probes, probe_to_json
from phalanx.launch.hang.verdict import Verdict, judge
from phalanx.launch.hang.watched_rank import WatchedRank

STARTING = 6.0
"""How many times longer a rank may take that starts, where nothing is certain."""

logger = logging.getLogger("phalanx.launch")

_SLOWEST_S, _FASTEST_S = 1.0, 0.1
_ABSENT_S = 5.0
"""A gap between two ticks that is no delay of a busy machine."""

_MAX_PAUSE_S = 60.0
"""Seconds at most between two readings of stacks that show nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HangSettings:
    """When a job counts as hung, and what is done then."""

    after_s: float
    """Seconds that a wait may take beyond what is usual; 0 for no watch."""

    timeout_s: float
    """Seconds from the report to the end of the job, while nobody who is waited for, nor what it started, works; 0 for
    never."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HangNews:
    """What the watch has to say."""

    kind: Literal["hung", "resumed", "expired"]
    verdict: Verdict


@dataclass
class HangWatch:
    """Watches the processes of an attempt on this host.

    Args:
        settings: When to report.
        channel: To the launchers of the other hosts, which observe their ranks when this one asks; None with one host.
        host: Name of this host, where there are several.
    """

    settings: HangSettings
    channel: ProbeChannel | None = None
    host: str = ""
    _news: queue.SimpleQueue[HangNews] = field(default_factory=queue.SimpleQueue)
    _heard: queue.SimpleQueue[dict[str, Any]] = field(default_factory=queue.SimpleQueue)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ranks: dict[str, WatchedRank] = field(default_factory=dict)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _reported: Verdict | None = None
    _progress: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """How far each rank was at the report."""

    _quiet_s: float = 0.0
    """How long nobody has worked since the report."""

    _forgiven_s: float = 0.0
    """The longest wait that was reported and ended by itself: such a job has long waits."""

    _ticked: float = 0.0
    _next_probe: float = 0.0
    _pause_s: float = 0.0
    _thread: threading.Thread | None = None

    def watch(self, processes: Sequence[Watched]) -> None:
        """Watch these processes from now on, and no others."""
        with self._lock:
            if not self._ranks:
                self._next_probe = time.monotonic() + self.settings.after_s  # what lasted until now says nothing
            before = {rank.process.pid: rank for rank in self._ranks.values()}
            self._ranks = {}
            for process in processes:
                rank = self._ranks[process.title] = before.get(process.pid) or WatchedRank(process)
                # In an elastic job its number may be another now.
                rank.process = replace(process, ended=rank.process.ended)
        if self._thread is None and self.settings.after_s:
            self._thread = threading.Thread(target=self._run, name="hang watch", daemon=True)
            self._thread.start()

    def note_end(self, title: str, ended: str) -> None:
        """Keep in mind how a process ended that others may wait for."""
        with self._lock:
            if title in self._ranks:
                rank = self._ranks[title]
                rank.process = replace(rank.process, ended=ended)

    def receive_probe(self, message: dict[str, Any]) -> None:
        """Take what the launchers of other hosts ask or saw."""
        if self.settings.after_s:
            self._heard.put(message)
        elif self.channel is not None and "everywhere" not in message:
            self.channel.publish_probe(
                message["probe"], probe_to_json((), 0.0)
            )  # the others need not wait for this host

    def take(self) -> HangNews | None:
        """Return what is new, or None."""
        try:
            return self._news.get_nowait()
        except queue.Empty:
            return None

    def stop(self) -> None:
        """End the watch. A probe under way ends by itself: who waits for this has a job to end."""
        self._stopped.set()

    def _run(self) -> None:
        tick_s = min(_SLOWEST_S, max(_FASTEST_S, self.settings.after_s / 5))
        while not self._stopped.wait(tick_s):
            try:
                self._tick(tick_s)
                self._ticked = time.monotonic()
            except Exception:  # a job must not be less watched for one that failed
                logger.exception("the watch for hangs failed, and continues")
                self._stopped.wait(_MAX_PAUSE_S)

    def _tick(self, tick_s: float) -> None:
        with self._lock:
            ranks = list(self._ranks.values())
        now = time.monotonic()
        for rank in ranks:
            if not rank.process.ended:
                rank.observe(now)
        if self._ticked and now - self._ticked > _ABSENT_S + tick_s:
            # This launcher was stopped, and so perhaps was the job: what lasted until now says nothing.
            self._next_probe = now + self.settings.after_s
            for rank in ranks:
                rank.idle_since = now
        late = self._late(ranks, now)
        if self.channel is not None:
            self._join_probes(self.channel, ranks, late)
        if self._reported is not None:
            self._follow_up(self._reported, {rank.process.title: rank for rank in ranks}, tick_s)
        elif not late:
            self._pause_s = 0.0
        elif now >= self._next_probe:
            # Whoever waits for something else, such as data, is looked at less and less often.
            self._pause_s = min(_MAX_PAUSE_S, 2 * self._pause_s or self.settings.after_s / 4)
            self._next_probe = now + self._pause_s
            if self.channel is not None:
                self.channel.request_probe()
            else:
                self._conclude(JobProbe(observations=self._observe(ranks), patience_s=self._patience_s(late)), ranks)

    def _late(self, ranks: Sequence[WatchedRank], now: float) -> list[WatchedRank]:
        """Ranks that have waited for longer than is usual, for whatever it is."""
        alive = [rank for rank in ranks if not rank.process.ended and rank.process.role != "server"]
        return [rank for rank in alive if rank.waited_s(now) >= self.settings.after_s + self._usual_s(rank)]

    def _observe(self, ranks: Sequence[WatchedRank]) -> list[Observation]:
        seen = zip(observe([rank.process for rank in ranks]), ranks, strict=True)
        return [replace(o, host=self.host, idle_s=max(0.0, o.at - rank.idle_since)) for o, rank in seen]

    def _join_probes(self, channel: ProbeChannel, ranks: Sequence[WatchedRank], late: Sequence[WatchedRank]) -> None:
        """Observe the ranks of this host when a launcher asks for it, and judge what all of them saw."""
        while not self._heard.empty():
            message = self._heard.get()
            if "everywhere" not in message:
                channel.publish_probe(message["probe"], probe_to_json(self._observe(ranks), self._patience_s(late)))
                continue
            try:
                self._take_probe(merge_probes(message["everywhere"]), ranks)
            except UNREADABLE as error:
                logger.warning("what another host saw of its ranks cannot be read (%r)", error)

    def _take_probe(self, probe: JobProbe, ranks: Sequence[WatchedRank]) -> None:
        """Judge what all hosts saw; where none of the ranks here is concerned, see whether the report is over."""
        if self._reported is None:
            self._conclude(probe, ranks)
        elif not self._is_part(self._reported, {rank.process.title for rank in ranks}):
            verdict = judge(probe.observations)
            if verdict is None or verdict.culprits != self._reported.culprits:
                self._resume(self._reported)

    @staticmethod
    def _is_part(verdict: Verdict, titles: Collection[str]) -> bool:
        """Whether ranks of this host wait, or are waited for."""
        return any(title in titles for title in (*verdict.waiting, *verdict.culprits))

    def _resume(self, verdict: Verdict) -> None:
        self._reported = None
        self._forgiven_s = max(self._forgiven_s, time.monotonic() - verdict.at + verdict.waited_s)
        self._news.put(HangNews(kind="resumed", verdict=verdict))

    def _conclude(self, probe: JobProbe, ranks: Sequence[WatchedRank]) -> None:
        """Judge, and report a verdict that counts."""
        verdict = judge(probe.observations)
        if verdict is None:
            return
        if verdict.is_certain or (not verdict.is_compiling and verdict.waited_s >= probe.patience_s):
            self._reported, self._quiet_s = verdict, 0.0
            self._progress = {rank.process.title: rank.progress for rank in ranks}
            self._news.put(HangNews(kind="hung", verdict=verdict))
        else:
            self._next_probe = time.monotonic() + self.settings.after_s / 4

    def _usual_s(self, rank: WatchedRank) -> float:
        return max(rank.usual_s, self._forgiven_s)

    def _patience_s(self, late: Sequence[WatchedRank]) -> float:
        """How long a wait lasts at least that is worth a report. A start may take long."""
        patience_s = self.settings.after_s * (STARTING if any(rank.is_starting for rank in late) else 1.0)
        return patience_s + max((self._usual_s(rank) for rank in late), default=0.0)

    def _follow_up(self, verdict: Verdict, ranks: Mapping[str, WatchedRank], tick_s: float) -> None:
        """See whether the job continues again, or has waited long enough."""
        if not self._is_part(verdict, ranks):
            self._ask_about(verdict, ranks)
            return
        waiting = [(ranks[title], counts) for title, counts in verdict.waiting.items() if title in ranks]
        culprits = [ranks[title] for title in verdict.culprits if title in ranks]
        if any(rank.has_moved(counts, verdict.at) for rank, counts in waiting) or any(
            rank.progress != self._progress.get(rank.process.title, rank.progress) for rank in culprits
        ):
            self._resume(verdict)
            return
        alive = [rank for rank in culprits if not rank.process.ended]
        works = verdict.cause == "rank" and any([rank.has_worked(tick_s) for rank in alive])
        self._quiet_s += 0.0 if works else tick_s
        # Of several launchers the one that sees the rank decides.
        if self.settings.timeout_s and culprits and self._quiet_s >= self.settings.timeout_s:
            self._news.put(HangNews(kind="expired", verdict=verdict))
            self._stopped.set()

    def _ask_about(self, verdict: Verdict, ranks: Mapping[str, WatchedRank]) -> None:
        """Learn from other hosts whether the job makes progress, where none of its ranks here is concerned."""
        now = time.monotonic()
        if self.channel is None or not ranks:
            self._resume(verdict)  # its ranks left the job
        elif now >= self._next_probe:
            self._next_probe = now + _MAX_PAUSE_S
            self.channel.request_probe()
