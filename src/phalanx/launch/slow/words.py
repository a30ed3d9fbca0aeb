"""`lines_of`: losses as sentences (pure)."""

from __future__ import annotations

from phalanx.i18n import tr
from phalanx.launch.hang.words import names_of
from phalanx.launch.slow.stragglers import CauseTime, Losses, Straggler
from phalanx.launch.slow.time_spent import RankName
from phalanx.units import format_bytes

_HOUR_S = 3600.0


def lines_of(losses: Losses) -> tuple[str, ...]:
    """Return a sentence for each loss, the largest first."""
    lines = [_of_straggler(each, losses.total_s) for each in losses.stragglers]
    lines += [_of_all(each) for each in losses.common]
    return tuple(lines)


def rank_title(rank: RankName) -> str:
    """Return what to call a rank in a sentence: `rank 2`, or its member id."""
    return f"rank {rank}" if isinstance(rank, int) else rank


def _of_straggler(straggler: Straggler, total_s: float) -> str:
    share = straggler.lost_s / total_s
    return tr(
        "{waiters} waited {hourly:.0f} s an hour for {straggler} ({share:.0%} of the time): {causes}",
        waiters=names_of(map(rank_title, straggler.waiters)),
        straggler=rank_title(straggler.rank),
        hourly=share * _HOUR_S,
        share=share,
        causes="; ".join(_of_cause(each) for each in straggler.causes),
    )


def _of_cause(each: CauseTime) -> str:
    share = min(1.0, each.own_s / each.total_s)
    if each.cause == "throttled":
        quota = "" if each.cores is None else tr(" (cpu.max: {cores:.3g} cores)", cores=each.cores)
        return tr("its cgroup was throttled {share:.0%} of the time{quota}", share=share, quota=quota)
    if each.cause == "contention":
        return tr("other processes had its core {share:.0%} of the time", share=share)
    if each.cause == "swap":
        size = format_bytes(each.swapped_bytes)
        return tr("it waited {share:.0%} of the time for its memory, {size} of it swapped out", share=share, size=size)
    if each.cause == "disk":
        return tr("it waited {share:.0%} of the time for a disk or a network file system", share=share)
    if each.cause == "collector":
        return tr(
            "Python's garbage collector ran {share:.0%} of the time (gc.freeze() after the start helps)", share=share
        )
    if each.cause == "input":
        return tr("its input took {share:.0%} of the time", share=share)
    if each.cause == "asleep":
        return tr("it slept {share:.0%} of the time: for a socket, a lock or a process of its own", share=share)
    return tr("it computed for longer: {share:.0%} of the time", share=share)


def _of_all(each: CauseTime) -> str:
    share = min(1.0, each.own_s / each.total_s)
    if each.cause == "network":
        return tr(
            "the ranks of this host waited {share:.0%} of the time for those of other hosts, or for the network",
            share=share,
        )
    return tr("of every rank: {cause}", cause=_of_cause(each))
