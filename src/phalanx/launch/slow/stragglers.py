"""`find_losses`: from what ranks spent their time on, whom the others waited for, how long, and what kept it (pure)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

from phalanx.launch.slow.time_spent import RankName, TimeSpent

Cause: TypeAlias = Literal[
    "throttled", "contention", "swap", "disk", "collector", "input", "asleep", "computation", "network"
]

MIN_LOSS_S = 3.0
"""Seconds lost below which nothing is worth a word."""

_MIN_PART = 0.2
"""Part of a straggler's delay that a cause must explain to be named."""

_MAX_CAUSES = 2
_SHARED: tuple[Cause, ...] = ("input", "throttled", "swap", "disk", "collector")
"""What ranks may lose alike. A machine with more busy threads than cores is one that somebody chose."""

_COMMON = 2.0
"""How many times larger what all ranks lose alike must be: a little input and collection belongs to training."""

_SWAPPING = 10.0
"""Pages a second from a disk above which a rank that waits for the disk waits for its own memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CauseTime:
    """What a rank lost to one cause."""

    cause: Cause
    seconds: float
    """More than the other ranks lost to it."""

    own_s: float
    """What it lost in all."""

    total_s: float
    cores: float | None = None
    """The quota, where that is the cause."""

    swapped_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """A rank that others waited for."""

    rank: RankName
    waiters: tuple[RankName, ...]
    lost_s: float
    """How long each of them waited for it, in the mean."""

    causes: tuple[CauseTime, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Losses:
    """Where the time of a job went that was not spent on training."""

    total_s: float
    stragglers: tuple[Straggler, ...] = ()
    """Those that cost most first."""

    common: tuple[CauseTime, ...] = ()
    """What all ranks lost alike, of the rank that lost least."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @property
    def lost_s(self) -> float:
        """All of it."""
        return sum(each.lost_s for each in self.stragglers) + sum(each.seconds for each in self.common)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is worth a word."""
        return not self.stragglers and not self.common


def find_losses(spent: Mapping[RankName, TimeSpent], min_share: float, *, has_other_hosts: bool = False) -> Losses:
    """Return what is worth a word.

    Args:
        spent: What each rank of this host spent one stretch of time on.
        min_share: Part of the time below which nothing is.
        has_other_hosts: Whether the ranks may have waited for some that are not among them.
    """
    total_s = max((each.total_s for each in spent.values()), default=0.0)
    min_loss_s = max(MIN_LOSS_S, min_share * total_s)
    ranks = sorted({rank for each in spent.values() for rank in each.waits_s}, key=_order)
    stragglers = [s for rank in ranks if (s := _straggler(rank, spent)) is not None and s.lost_s >= min_loss_s]
    # Of an elastic job: what a rank had that came or left in between says little of all.
    whole = [each for each in spent.values() if each.total_s >= total_s / 2]
    common = [each for each in _common(whole, total_s) if each.seconds >= _COMMON * min_loss_s]
    network_s = min((_elsewhere_s(each, spent) for each in whole), default=0.0)
    if has_other_hosts and network_s >= min_loss_s:
        common.append(CauseTime(cause="network", seconds=network_s, own_s=network_s, total_s=total_s))
    stragglers.sort(key=lambda each: -each.lost_s)
    return Losses(total_s=total_s, stragglers=tuple(stragglers), common=tuple(common))


def _order(rank: RankName) -> tuple[int, str]:
    """Sort numbers as numbers, and ids by theirs."""
    return len(str(rank)), str(rank)


def _elsewhere_s(each: TimeSpent, spent: Mapping[RankName, TimeSpent]) -> float:
    """How long a rank waited for ranks that are not among these, as far as it is known."""
    return each.unnamed_wait_s + sum(seconds for rank, seconds in each.waits_s.items() if rank not in spent)


def _straggler(rank: RankName, spent: Mapping[RankName, TimeSpent]) -> Straggler | None:
    waits = {other: each.waits_s.get(rank, 0.0) for other, each in spent.items() if other != rank}
    longest_s = max(waits.values(), default=0.0)
    waiters = tuple(sorted((other for other, seconds in waits.items() if seconds >= longest_s / 2), key=_order))
    if not longest_s or rank not in spent:
        return None
    lost_s = statistics.fmean(waits[other] for other in waiters)
    others = [spent[other] for other in waiters]
    return Straggler(rank=rank, waiters=waiters, lost_s=lost_s, causes=_causes(spent[rank], others, lost_s))


def _causes(own: TimeSpent, others: Sequence[TimeSpent], lost_s: float) -> tuple[CauseTime, ...]:
    """Return what kept a rank and did not keep the others as much, the largest first."""
    causes = []
    times = _times(own)
    # Of an elastic job: some were there for longer.
    others_times = [(_times(other), own.total_s / max(other.total_s, 1e-9)) for other in others]
    for cause, own_s in times.items():
        more_s = own_s - statistics.median(scale * each.get(cause, 0.0) for each, scale in others_times)
        if more_s >= _MIN_PART * lost_s:
            causes.append(_cause_time(cause, more_s, own_s, own))
    causes.sort(key=lambda each: -each.seconds)
    if not causes:
        causes = [_cause_time("computation", lost_s, times["computation"], own)]
    return tuple(causes[:_MAX_CAUSES])


def _common(spent: Sequence[TimeSpent], total_s: float) -> list[CauseTime]:
    """Return what every rank lost in `total_s`."""
    times = [(_times(each), total_s / max(each.total_s, 1e-9)) for each in spent]
    lost = {cause: min((scale * each.get(cause, 0.0) for each, scale in times), default=0.0) for cause in _SHARED}
    return [
        _cause_time(cause, seconds, seconds, replace(spent[0], total_s=total_s))
        for cause, seconds in lost.items()
        if seconds
    ]


def _times(spent: TimeSpent) -> dict[Cause, float]:
    """Return the seconds of a rank by what may make it late."""
    is_swapping = spent.swapped_bytes > 0 and spent.faults >= _SWAPPING * spent.total_s
    elsewhere_s = max(spent.in_calls_s, sum(spent.waits_s.values())) + spent.unnamed_wait_s + spent.input_wait_s
    return {
        "throttled": min(spent.throttled_s, max(0.0, spent.total_s - spent.cpu_s)),
        "contention": max(0.0, spent.queued_s - spent.throttled_s),
        "swap" if is_swapping else "disk": spent.uninterruptible_s,
        "collector": spent.collector_s,
        "input": spent.input_s,
        "asleep": max(0.0, spent.blocked_s - elsewhere_s),
        "computation": max(0.0, spent.cpu_s - spent.collector_s - spent.input_cpu_s),
    }


def _cause_time(cause: Cause, seconds: float, own_s: float, spent: TimeSpent) -> CauseTime:
    return CauseTime(
        cause=cause,
        seconds=seconds,
        own_s=own_s,
        total_s=spent.total_s,
        cores=spent.cores if cause == "throttled" else None,
        swapped_bytes=spent.swapped_bytes if cause == "swap" else 0,
    )
