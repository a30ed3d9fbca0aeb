"""`describe_call` and other words of a hang report: who, where, in what, for how long (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from phalanx.i18n import tr
from phalanx.launch.hang.observe import IDLE_CPU, Observation
from phalanx.launch.process.source_files import STARTER, path_for_user
from phalanx.launch.rank.activity import Call

DEFAULT_GROUP = ("0", "default_pg", "")
"""Names that torch gives the group of all ranks."""

MAX_FRAMES = 8
"""Lines of a stack that are shown."""


def describe_location(culprit: Observation) -> str:
    """`rank 2 is at train.py:81 in DataLoader.__next__`."""
    title = f"{culprit.title} ({culprit.host})" if culprit.host else culprit.title
    if culprit.ended:
        return tr("{rank} {ended}", rank=title, ended=culprit.ended)
    if culprit.role == "server":
        return tr("{server} does not answer", server=title)
    if culprit.location.kind == "unknown":
        return tr("{rank} is in no call of its group", rank=title)
    return tr("{rank} is at {place}", rank=title, place=culprit.location)


def details_of(culprit: Observation) -> Iterable[str]:
    """What helps to understand why a process does not come, a line each."""
    yield from culprit.troubles
    if culprit.ended:
        return
    if culprit.holds_lock:
        yield tr("something in C holds its interpreter lock: no other Python of that process runs")
    if culprit.location.kind == "compile":
        yield tr("it compiles")
    if not culprit.is_stopped:
        share = tr("it uses {share:.0%} of a core", share=culprit.cpu)
        if culprit.cpu >= IDLE_CPU:
            yield share
        elif culprit.work:
            yield tr("its main thread waits; another thread, or a process that it started, is at work")
        else:
            yield tr("it waits, without using a processor")
    if culprit.problem:
        yield tr("its stack could not be read: {why}", why=culprit.problem)
    for frame in takewhile(lambda frame: not frame.file.endswith(STARTER), culprit.location.frames[:MAX_FRAMES]):
        yield f"  {path_for_user(frame.file)}:{frame.line} {frame.function}"


def describe_call(observation: Observation, call: Call | None) -> str:
    """`all_reduce 4117 (float32[25557032]) called at train.py:92`, as far as it is known."""
    location = observation.location
    if call is None:
        what = location.verb or location.function or tr("a call")
    else:
        what = f"{call.verb} {call.number}" if call.is_collective else call.verb
        what += f" ({call.detail})" if call.detail else ""
        what += f" for {call.label}" if call.label else ""
        if call.group.partition("@")[0] not in DEFAULT_GROUP:
            what += f" of {group_name(call.group, call.members)}" if call.is_collective else f" from {call.group}"
    return tr("{call} called at {source}", call=what, source=location.source) if location.source else what


def group_name(group: str, members: Sequence[int] = ()) -> str:
    """`group 1 (ranks 0, 2)`, by the group's name and global ranks."""
    group = group.partition("@")[0]
    if group in DEFAULT_GROUP:
        return tr("the default group")
    ranks = f" (ranks {', '.join(map(str, members))})" if members else ""
    return tr("group {name}", name=group) + ranks


def names_of(titles: Iterable[str]) -> str:
    """`rank 1`, or `ranks 0, 1, 3`; other processes by their titles."""
    names = list(titles)
    ranks = [name.removeprefix("rank ") for name in names if name.startswith("rank ")]
    others = [name for name in names if not name.startswith("rank ")]
    if len(ranks) > 1:
        return ", ".join([f"ranks {', '.join(ranks)}", *others])
    return ", ".join(names)


def duration(seconds: float) -> str:
    """` for 14 s`, or nothing where it is not known how long."""
    return tr(" for {seconds:.0f} s", seconds=seconds) if seconds >= 1.0 else ""
