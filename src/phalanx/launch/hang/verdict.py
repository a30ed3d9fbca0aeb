"""`judge`: from what the processes of a job do, who waits for whom, and why (pure).

Ranks wait for ranks: whoever has begun a call waits for the members of its group that have begun fewer. Whoever is
waited for and waits for nobody is the one to look at. Where nobody is left, the ranks wait for each other, and what
they called tells how.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any, Literal, TypeAlias

from phalanx.i18n import tr
from phalanx.launch.hang.locations import WAITS
from phalanx.launch.hang.observe import IDLE_CPU, Observation
from phalanx.launch.hang.words import describe_call, describe_location, details_of, duration, group_name, names_of
from phalanx.launch.rank.activity import Call

Cause: TypeAlias = Literal["rank", "order", "mismatch", "network"]

_MOST = 4
"""Most ranks whose state and stack are shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Why a job is stalled."""

    cause: Cause
    """"rank": one is elsewhere. "order", "mismatch": ranks made different calls. "network": all made the same one."""

    culprits: tuple[str, ...]
    """Titles of those that the others wait for; for "order" and "mismatch" all that take part."""

    lines: tuple[str, ...]
    """What to show: the verdict first, then what helps to understand it."""

    waited_s: float
    works: bool
    """Whether one of the culprits, or what it started, computes or reads: it may come, and the job is not ended."""

    is_certain: bool
    """Whether waiting longer would change nothing: one is stopped or has ended, or the calls contradict each other."""

    is_compiling: bool = False
    waiting: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Who waits, with the counts of its progress that must change when the job continues; none where nothing counts."""

    at: float = 0.0
    """When, on the monotonic clock."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Wait:
    """One rank that waits."""

    of: Observation
    call: Call | None

    @property
    def words(self) -> str:
        """`all_reduce 4117 (float32[25557032]) called at train.py:92`."""
        return describe_call(self.of, self.call)

    @property
    def is_unsure(self) -> bool:
        """Whether the rank knows that a collective has not ended, and has not looked yet which."""
        activity = self.of.activity
        return self.call is None and activity is not None and activity.progress[1] > activity.progress[2]

    @property
    def since(self) -> float:
        return self.call.since if self.call is not None else self.of.at - self.of.idle_s


def judge(observations: Sequence[Observation]) -> Verdict | None:
    """Return why a job is stalled, or None where no rank is seen to wait for another.

    Args:
        observations: One of each process of the job.
    """
    waits = {o.title: wait for o in observations if (wait := _wait_of(o)) is not None}
    if not waits:
        return None
    by_title = {o.title: o for o in observations}
    targets = {title: _targets(wait, waits, by_title) for title, wait in waits.items()}
    now = max(o.at for o in observations)
    waited_s = max(now - wait.since for wait in waits.values())
    if mismatch := _mismatch(list(waits.values())):
        return _verdict("mismatch", mismatch[0], mismatch[1], waits, waited_s)
    culprits = [by_title[title] for title in _sinks(targets, waits)]
    if culprits:
        return _rank_verdict(culprits, waits, waited_s)
    if absent := _absent(waits.values(), by_title):
        line = tr(
            "{waits}; not seen: {ranks}, on another host. Ask there", waits=_all_waits(waits, waited_s), ranks=absent
        )
        return _verdict("rank", (), [line], waits, waited_s)
    if cycle := [title for title, wait in waits.items() if targets[title] or (wait.call is None and len(waits) > 1)]:
        if any(wait.is_unsure for wait in waits.values()):
            return None  # their ranks will say in a moment which calls they are in
        return _order_verdict([waits[title] for title in cycle], waits, waited_s)
    titles = names_of(waits)
    words = next(iter(waits.values())).words
    line = tr(
        "all ranks have entered {call}{time} but it does not complete ({ranks}): check network, device and driver",
        call=words, time=duration(waited_s), ranks=titles,
    )  # fmt: skip
    return _verdict("network", tuple(waits), [line], waits, waited_s) if len(waits) > 1 else None


def _wait_of(observation: Observation) -> _Wait | None:
    """Return in what a process waits for others, or None when it does not."""
    if observation.ended or observation.is_stopped or observation.holds_lock or observation.role == "server":
        return None
    call = min(observation.calls, key=lambda call: call.since, default=None)
    kind, is_idle = observation.location.kind, observation.cpu < IDLE_CPU
    if call is None:
        waits = is_idle and kind in (*WAITS, "backward")
    elif call.backend == "nccl":
        # A driver may spin while it waits for a card, and the script may be at any line that needs a result.
        waits = kind in (*WAITS, "backward", "unknown") or (kind == "code" and observation.cpu > 0.5)
    else:
        waits = kind in WAITS or (is_idle and kind in ("backward", "unknown"))
    return _Wait(observation, call) if waits else None


def _targets(wait: _Wait, waits: Mapping[str, _Wait], by_title: Mapping[str, Observation]) -> list[str]:
    """Titles of the processes that a rank waits for."""
    call, me = wait.call, wait.of.title
    if call is None:
        # What is waited in is not known by name: whoever does not wait could end it.
        others = [t for t, o in by_title.items() if t != me and t not in waits and o.role != "server"]
        servers = [t for t, o in by_title.items() if o.role == "server"]
        return servers if wait.of.location.kind == "server" else others
    behind = []
    for title in (f"rank {member}" for member in call.members if f"rank {member}" != me):
        other = by_title.get(title)
        if other is not None and call.is_collective and _is_behind(other, call):
            behind.append(title)
    missing = [title for title in call.missing if title in by_title]
    return list(dict.fromkeys([*behind, *missing]))


def _is_behind(other: Observation, call: Call) -> bool:
    """Whether a member of a call's group has not begun it, or can never end it."""
    if other.ended or other.is_stopped:
        return True
    if other.activity is None:
        return other.location.kind not in WAITS
    return other.activity.begun.get(call.group, 0) < call.number


def _sinks(targets: Mapping[str, Sequence[str]], waits: Mapping[str, _Wait]) -> list[str]:
    """Those who are waited for, and wait for nobody themselves."""
    reached = [title for titles in targets.values() for title in titles]
    return [title for title in dict.fromkeys(reached) if title not in waits]


def _absent(waits: Iterable[_Wait], by_title: Mapping[str, Observation]) -> str:
    """Ranks that belong to the calls and were not looked at, as words; empty where there are none."""
    members = {member for wait in waits if wait.call is not None for member in wait.call.members}
    return names_of(f"rank {member}" for member in sorted(members) if f"rank {member}" not in by_title)


def _all_waits(waits: Mapping[str, _Wait], waited_s: float) -> str:
    """`ranks 0, 1 wait for 14 s in all_reduce 7 (float32[8]) called at train.py:92`."""
    return "; ".join(
        tr("{ranks} wait{time} in {call}", ranks=ranks, time=duration(waited_s), call=words)
        if "," in ranks
        else tr("{rank} waits{time} in {call}", rank=ranks, time=duration(waited_s), call=words)
        for words, ranks in _grouped(waits).items()
    )


def _rank_verdict(culprits: Sequence[Observation], waits: Mapping[str, _Wait], waited_s: float) -> Verdict:
    lines = []
    where = "; ".join(describe_location(culprit) for culprit in culprits[:_MOST])
    if len(culprits) > _MOST:
        where += tr(" (and {count} more)", count=len(culprits) - _MOST)
    lines.append(f"{where}; {_all_waits(waits, waited_s)}")
    for culprit in culprits[:_MOST]:
        lines += [f"{culprit.title}: {line}" for line in details_of(culprit)]
    is_certain = all(culprit.is_stopped or culprit.ended or culprit.holds_lock for culprit in culprits)
    verdict = _verdict("rank", tuple(culprit.title for culprit in culprits), lines, waits, waited_s)
    return replace(
        verdict,
        works=any(culprit.is_working for culprit in culprits),
        is_certain=is_certain,
        is_compiling=any(culprit.location.kind == "compile" and culprit.is_working for culprit in culprits),
    )


def _mismatch(waits: Sequence[_Wait]) -> tuple[tuple[str, ...], list[str]] | None:
    """Return the ranks and a line where ranks made different calls under one number of one group."""
    by_call: dict[tuple[str, tuple[int, ...], int], list[_Wait]] = {}
    for wait in waits:
        if wait.call is not None and wait.call.is_collective:
            by_call.setdefault((wait.call.group, wait.call.members, wait.call.number), []).append(wait)
    for (group, _, number), same in by_call.items():
        looks = {(w.call.verb, _amount(w.call.detail) if _is_even(w.call.verb) else "") for w in same if w.call}
        if len(looks) > 1:
            line = tr(
                "ranks made different calls as call {number} of {group}: {calls}. All ranks of a group must make the "
                "same calls in the same order",
                number=number, group=group_name(group), calls=_all_calls(same),
            )  # fmt: skip
            return tuple(w.of.title for w in same), [line]
    return None


def _amount(detail: str) -> str:
    """Type and number of elements: what backends compare, whatever the shape."""
    dtype, _, shape = detail.partition("[")
    return f"{dtype} {prod(int(size) for size in re.findall(r'[0-9]+', shape.partition(']')[0]))}"


def _is_even(verb: str) -> bool:
    """Whether ranks give this collective tensors of one shape."""
    return verb in ("all_reduce", "allreduce", "broadcast", "reduce", "all_gather_single", "allgather_base")


def _order_verdict(cycle: Sequence[_Wait], waits: Mapping[str, _Wait], waited_s: float) -> Verdict:
    line = tr(
        "ranks wait for each other: {calls}. All ranks must make the same calls in one order, those of different "
        "groups too: look for an `if` on the rank around one of them",
        calls=_all_calls(cycle),
    )
    return _verdict("order", tuple(wait.of.title for wait in cycle), [line], waits, waited_s)


def _all_calls(waits: Iterable[_Wait]) -> str:
    grouped = _grouped({wait.of.title: wait for wait in waits})
    return "; ".join(tr("{ranks} in {call}", ranks=ranks, call=words) for words, ranks in grouped.items())


def _grouped(waits: Mapping[str, _Wait]) -> dict[str, str]:
    """Return who waits, by what is waited in."""
    titles: dict[str, list[str]] = {}
    for title, wait in waits.items():
        titles.setdefault(wait.words, []).append(title)
    return {words: names_of(names) for words, names in titles.items()}


def _verdict(
    cause: Cause, culprits: tuple[str, ...], lines: Sequence[str], waits: Mapping[str, _Wait], waited_s: float
) -> Verdict:
    return Verdict(
        cause=cause,
        culprits=culprits,
        lines=tuple(lines),
        waited_s=waited_s,
        works=False,
        is_certain=cause in ("order", "mismatch"),
        waiting={title: _progress(wait) for title, wait in waits.items()},
        at=max(wait.of.at for wait in waits.values()),
    )


def _progress(wait: _Wait) -> tuple[int, ...]:
    counts = wait.call is not None and wait.call.is_collective and wait.of.activity is not None
    return wait.of.activity.progress if counts and wait.of.activity is not None else ()
