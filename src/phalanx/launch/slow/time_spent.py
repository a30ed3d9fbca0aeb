"""`TimeSpent`: what a rank spent a stretch of time on, and for whom it waited (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from phalanx.launch.slow.counters import Reading

RankName: TypeAlias = int | str
"""A rank's number; in an elastic job, where a number passes from one process to another, its member id: `n0.2`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeSpent:
    """Seconds of one rank's main thread. Those of the causes may overlap: a collector may be throttled."""

    total_s: float = 0.0
    cpu_s: float = 0.0
    queued_s: float = 0.0
    """It could have run; what the quota held back is part of it."""

    throttled_s: float = 0.0
    uninterruptible_s: float = 0.0
    input_s: float = 0.0
    input_cpu_s: float = 0.0
    collector_s: float = 0.0
    in_calls_s: float = 0.0
    """It waited for the end of collectives."""

    waits_s: Mapping[RankName, float] = field(default_factory=dict)
    """It waited for a rank to come to a collective, by that rank."""

    unnamed_wait_s: float = 0.0
    """It waited in collectives that do not say for whom."""

    faults: int = 0
    swapped_bytes: int = 0
    cores: float | None = None

    @property
    def input_wait_s(self) -> float:
        """It waited in a loader, and used no processor."""
        return max(0.0, self.input_s - self.input_cpu_s)

    @property
    def blocked_s(self) -> float:
        """It could not have run: it waited for something."""
        return max(0.0, self.total_s - self.cpu_s - max(self.queued_s, self.throttled_s) - self.uninterruptible_s)


def spent_between(before: Reading, after: Reading) -> TimeSpent:
    """Return what a rank spent the time between two readings on."""
    old, new = before.activity, after.activity
    spent = TimeSpent(
        total_s=after.at - before.at,
        cpu_s=after.cpu_s - before.cpu_s,
        queued_s=after.queued_s - before.queued_s,
        throttled_s=min(max(0.0, after.throttled_s - before.throttled_s), after.at - before.at),
        uninterruptible_s=after.uninterruptible_s - before.uninterruptible_s,
        input_s=new.input_s - old.input_s,
        input_cpu_s=new.input_cpu_s - old.input_cpu_s,
        collector_s=new.collector_s - old.collector_s,
        faults=after.faults - before.faults,
        swapped_bytes=after.swapped_bytes,
        cores=after.cores,
    )
    free_s = max(0.0, spent.blocked_s - spent.input_wait_s)
    main = _since(old.main_waits_s, new.main_waits_s)
    entered = _since(old.entered_waits_s, new.entered_waits_s)
    main_s, entered_s = sum(main.values()), sum(entered.values())
    # Waits that the main thread makes elsewhere, as DistributedDataParallel's, are known from its entry on: it may have
    # computed meanwhile, but then it did run.
    more_s = max(0.0, min(entered_s, free_s) - main_s)
    scale = more_s / (entered_s - main_s) if entered_s > main_s else 0.0
    waits: dict[RankName, float] = {
        rank: main.get(rank, 0.0) + scale * (s - main.get(rank, 0.0)) for rank, s in entered.items()
    }
    return replace(
        spent,
        in_calls_s=max(main_s + more_s, new.in_calls_s - old.in_calls_s),
        waits_s=waits,
        unnamed_wait_s=min(new.begun_calls_s - old.begun_calls_s, max(0.0, free_s - main_s - more_s)),
    )


def rename_ranks(spent: TimeSpent, names: Mapping[int, RankName]) -> TimeSpent:
    """Return the same with the ranks that were waited for by their names, as far as these are known."""
    waits: dict[RankName, float] = {}
    for rank, seconds in spent.waits_s.items():
        waits[names.get(rank, rank) if isinstance(rank, int) else rank] = seconds
    return replace(spent, waits_s=waits)


def named_waits(spent: Mapping[RankName, TimeSpent]) -> dict[RankName, TimeSpent]:
    """Return the same with waits that do not say for whom: for the rank that waited least, as far as it did so less."""
    if len(spent) < 2 or not any(each.unnamed_wait_s for each in spent.values()):
        return dict(spent)
    last = min(spent, key=lambda rank: spent[rank].unnamed_wait_s)
    least_s = spent[last].unnamed_wait_s
    named = {}
    for rank, each in spent.items():
        waits = dict(each.waits_s)
        if rank != last:
            waits[last] = waits.get(last, 0.0) + each.unnamed_wait_s - least_s
        in_calls_s = each.in_calls_s + each.unnamed_wait_s
        named[rank] = replace(each, in_calls_s=in_calls_s, waits_s=waits, unnamed_wait_s=least_s)
    return named


def sum_of(stretches: Iterable[Mapping[RankName, TimeSpent]]) -> dict[RankName, TimeSpent]:
    """Return what each rank spent several stretches on, together."""
    total: dict[RankName, TimeSpent] = {}
    for stretch in stretches:
        for rank, each in stretch.items():
            total[rank] = _sum(total[rank], each) if rank in total else each
    return total


_SUMMED = ("total_s", "cpu_s", "queued_s", "throttled_s", "uninterruptible_s", "input_s", "input_cpu_s", "collector_s",
           "in_calls_s", "unnamed_wait_s", "faults")  # fmt: skip


def _sum(a: TimeSpent, b: TimeSpent) -> TimeSpent:
    waits = {rank: a.waits_s.get(rank, 0.0) + b.waits_s.get(rank, 0.0) for rank in {*a.waits_s, *b.waits_s}}
    sums: dict[str, Any] = {name: getattr(a, name) + getattr(b, name) for name in _SUMMED}
    return replace(b, **sums, waits_s=waits, swapped_bytes=max(a.swapped_bytes, b.swapped_bytes))


def _since(before: Mapping[str, float], after: Mapping[str, float]) -> dict[int, float]:
    return {int(rank): s - before.get(rank, 0.0) for rank, s in after.items() if s > before.get(rank, 0.0)}
