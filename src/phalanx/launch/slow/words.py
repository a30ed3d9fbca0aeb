"""`lines_of`: losses as sentences, and the goodput that was left (pure)."""

from __future__ import annotations

from phalanx.i18n import tr
from phalanx.launch.hang.words import names_of
from phalanx.launch.slow.stragglers import CauseTime, Losses, Straggler
from phalanx.units import format_bytes

_HOUR_S = 3600.0


def lines_of(losses: Losses) -> tuple[str, ...]:
    """Return a sentence for each loss, the largest first."""
    lines = [_of_straggler(each, losses.total_s) for each in losses.stragglers]
    lines += [_of_all(each) for each in losses.common]
    return tuple(lines)


def goodput_line(losses: Losses, start_s: float) -> str:
    """Return in one line how much of the time went into training, and where the rest was lost.

    Args:
        losses: Of the run, from its first steps on.
        start_s: What came before.
    """
    total_s = losses.total_s + start_s
    good_s = max(0.0, losses.total_s - losses.lost_s)
    lost = [f"{start_s:.1f} s start"]
    lost += [f"{each.lost_s:.1f} s waits for rank {each.rank}" for each in losses.stragglers]
    lost += [f"{each.seconds:.1f} s {each.cause}" for each in losses.common]
    share = 100 * good_s / max(total_s, 1e-9)
    return f"goodput {share:.1f} %: {good_s:.1f} s of steps in {total_s:.1f} s; lost: {', '.join(lost)}"


def _of_straggler(straggler: Straggler, total_s: float) -> str:
    share = straggler.lost_s / total_s
    return tr(
        "{waiters} waited {hourly:.0f} s an hour for rank {rank} ({share:.0%} of the time): {causes}",
        waiters=names_of(f"rank {rank}" for rank in straggler.waiters),
        rank=straggler.rank,
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
