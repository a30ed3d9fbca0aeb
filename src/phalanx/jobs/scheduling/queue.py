"""`choose`: job queue of one machine: priority aging, fair share, backfill (pure).

Line: a job stands before another if its level is higher; among equals whose owner used less lately, then the older one.
The level is the priority plus one for every AGEING_S waited, without end: only the jobs that are there already can
ever stand before it once it is ten levels up, so that it comes to the front whatever arrives later.

Backfill: who is not first may start only if the first in line starts no later for it, in whatever order the running
jobs end. How long jobs run is not guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from phalanx.jobs.scheduling.quotas import Quota
from phalanx.jobs.spec.training_job import TrainingJob

AGEING_S = 1800.0
"""Seconds of waiting that count as much as one step of priority."""

NAMED_AHEAD = 20
"""Positions in the queue that are given exactly. Behind them a reason stays the same while the queue moves."""

_MIB = 2**20


class Amount(NamedTuple):
    """Resources in whole units: thousandths of a core, MiB and GPUs."""

    cpu: int = 0
    memory: int = 0
    gpu: int = 0

    def plus(self, other: Amount) -> Amount:
        """Return the sum."""
        return Amount(*(a + b for a, b in zip(self, other, strict=True)))

    def minus(self, other: Amount) -> Amount:
        """Return the difference; parts may be negative."""
        return Amount(*(a - b for a, b in zip(self, other, strict=True)))

    def within(self, limit: Amount) -> bool:
        """Return whether every part is at most that of `limit`."""
        return all(a <= b for a, b in zip(self, limit, strict=True))

    def describe(self) -> str:
        """Return the amounts that are not zero in words: `4 cpu, 8 GiB of memory`."""
        return ", ".join(_describe_amount(name, part) for name, part in zip(self._fields, self, strict=True) if part)

    def lacking(self, free: Amount) -> str:
        """Return in words what is asked of which less is free: `4 cpu, 2 cpu are free`."""
        return "; ".join(
            f"{_describe_amount(name, needed)}, {_describe_amount(name, left) + ' are' if left > 0 else 'none is'} free"
            for name, needed, left in zip(self._fields, self, free, strict=True)
            if needed > left
        )


@dataclass(frozen=True)
class WaitingJob:
    """A job in line. `waited_s` are seconds since it was submitted; `owner` is who shares, of whatever kind."""

    id: str
    owner: str
    priority: int
    waited_s: float
    need: Amount
    queue: str = "default"


@dataclass(frozen=True)
class RunningJob:
    """A job that holds resources of this machine."""

    id: str
    owner: str
    need: Amount
    queue: str = "default"


@dataclass
class QueueDecision:
    """What is to be done now: ids to start, in order, and for every other job why it waits."""

    start: list[str] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)


def needed_amount(spec: TrainingJob, machine: Amount) -> Amount:
    """Return what a job holds of this machine, all its nodes and servers together.

    A job without `cpu` counts as one core per process, but never more than there are.
    """
    resources, servers = spec.resources, spec.servers
    processes = 1 if spec.launch == "env" else resources.procs_per_node
    cpu = resources.nodes * (resources.cpu or processes)
    memory, stated = resources.nodes * (resources.memory or 0), resources.cpu is not None
    if servers is not None:
        cpu += servers.count * (servers.cpu or 1)
        memory += servers.count * (servers.memory or 0)
        stated = stated or servers.cpu is not None
    thousandths = max(1, round(cpu * 1000))
    return Amount(
        thousandths if stated else min(thousandths, machine.cpu), -(-memory // _MIB), resources.nodes * resources.gpu
    )


def sort_queue(
    waiting: Sequence[WaitingJob], running: Sequence[RunningJob], recent_usage: Mapping[str, float]
) -> list[WaitingJob]:
    """Return the jobs in the order in which they are served.

    Args:
        waiting: The jobs in line.
        running: What runs; its owners stand behind those who have nothing running.
        recent_usage: Seconds that each owner's jobs ran lately.
    """
    running_of: dict[str, int] = {}
    for job in running:
        running_of[job.owner] = running_of.get(job.owner, 0) + 1
    return sorted(
        waiting,
        key=lambda job: (
            -(job.priority + int(job.waited_s / AGEING_S)),
            running_of.get(job.owner, 0),
            recent_usage.get(job.owner, 0.0),
            -job.waited_s,
            job.id,
        ),
    )


def choose(
    waiting: Sequence[WaitingJob],
    running: Sequence[RunningJob],
    capacity: Amount,
    recent_usage: Mapping[str, float],
    quotas: Mapping[str, Quota] | None = None,
) -> QueueDecision:
    """Return which jobs start now on a machine of `capacity`, and why the others wait.

    Args:
        waiting: The jobs in line, each of which alone fits the machine.
        running: What runs.
        capacity: What the machine has.
        recent_usage: Seconds that each owner's jobs ran lately, for fair shares.
        quotas: Limits by name of queue.
    """
    decision, active = QueueDecision(), list(running)
    free = capacity.minus(_sum([job.need for job in active]))
    spare, first, position = free, None, 0
    ordered = sort_queue(waiting, active, recent_usage)
    while ordered:
        job = ordered.pop(0)
        quota = (quotas or {}).get(job.queue)
        if not job.need.within(capacity):
            decision.reasons[job.id] = (
                f"needs more than this machine has ({job.need.describe()}, it has {capacity.describe()})"
            )
        elif quota is not None and not _allowed(
            quota, [other for other in active if other.queue == job.queue], job.need
        ):
            decision.reasons[job.id] = f"the quota of queue {job.queue} is used up"
        elif job.need.within(free) and _fits(job.need, spare):
            decision.start.append(job.id)
            active.append(RunningJob(job.id, job.owner, job.need, job.queue))
            free = free.minus(job.need)
            spare = free if first is None else _spare(first.need, active, capacity)
            # One more of this owner runs now, and others of the same level come first.
            ordered = sort_queue(ordered, active, recent_usage)
        else:
            if first is None:
                first, spare = job, _spare(job.need, active, capacity)
            position += 1
            decision.reasons[job.id] = _reason(job, first, position, free)
    return decision


def _allowed(quota: Quota, active: Sequence[RunningJob], more: Amount) -> bool:
    """Return whether a job that needs `more` may start beside `active`, jobs of the same queue."""
    total = _sum([other.need for other in active]).plus(more)
    return (
        (quota.cpu is None or total.cpu <= round(quota.cpu * 1000))
        and (quota.memory is None or total.memory <= quota.memory // _MIB)
        and (quota.gpu is None or total.gpu <= quota.gpu)
        and (quota.jobs is None or len(active) < quota.jobs)
    )


def _fits(more: Amount, spare: Amount) -> bool:
    return all(needed == 0 or needed <= there for needed, there in zip(more, spare, strict=True))


def _spare(first: Amount, active: Sequence[RunningJob], capacity: Amount) -> Amount:
    """Return how much may be started beside `active` so that `first` starts no later, whatever of it ends when.

    For each resource: the largest of the sums that some of the running jobs may hold while `first` fits leaves room for
    both. Sums are the set bits of a number, so all subsets take one shift a job.
    """
    amounts = []
    for resource, size in enumerate(capacity):
        room, sums = size - first[resource], 1
        for job in active:
            sums |= (sums << job.need[resource]) & ((2 << room) - 1)
        amounts.append(room - (sums.bit_length() - 1))
    return Amount(*amounts)


def _reason(job: WaitingJob, first: WaitingJob, position: int, free: Amount) -> str:
    stands = "next in line" if position == 1 else f"{_ordinal(position)} in line"
    if position > NAMED_AHEAD:
        return f"more than {NAMED_AHEAD} jobs are before it in line"
    if job.need.within(free):
        return f"fits now, but {first.id}, which is first in line, would start later; {stands}"
    return f"needs {job.need.lacking(free)}; {stands}"


def _sum(amounts: Sequence[Amount]) -> Amount:
    return Amount(*map(sum, zip(*amounts, strict=True))) if amounts else Amount()


def _describe_amount(name: str, amount: int) -> str:
    if name == "cpu":
        return f"{amount / 1000:g} cpu"
    return f"{amount / 1024:.3g} GiB of memory" if name == "memory" else f"{amount} gpu"


def _ordinal(number: int) -> str:
    ending = "th" if number // 10 % 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
