"""`observe`: observe the processes of a job on this host: state, stack, calls under way, data workers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from phalanx.cluster import proc
from phalanx.i18n import tr
from phalanx.launch.hang.locations import WAITS, Location, location_of, location_of_frames
from phalanx.launch.hang.processes import ProcessState, state_of, troubles_of
from phalanx.launch.hang.stacks import Frame, read_stacks
from phalanx.launch.process.usage import ProcessUsage
from phalanx.launch.rank.activity import Activity, ActivityReader, Call, activity_from

LOOK_S = 0.3
"""Over how long the use of processor time is measured."""

_SILENT_S = 2.5
"""Silence of a rank's own reporter, beyond its interval, that means something on a busy machine too."""

IDLE_CPU = 0.02
"""Part of a core below which a process counts as waiting."""

_MAX_WORKERS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """A process to observe."""

    title: str
    """`rank 1`, `server 0`, ..."""

    role: str
    pid: int
    ended: str = ""
    """How it ended, where it has: `ended with exit code 0`."""

    member: str = ""
    """Its id in an elastic job: `n0.2`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What was observed of a process. Times are of the machine's monotonic clock."""

    title: str
    role: str
    pid: int
    location: Location
    at: float
    host: str = ""
    """Name of its host, where the job has several."""

    ended: str = ""
    cpu: float = 0.0
    """Part of a core that its main thread used."""

    work: str = ""
    """What it did with all its threads and all it started, in words; empty for nothing."""

    idle_s: float = 0.0
    """For how long its main thread has not worked, as far as somebody watched it."""

    activity: Activity | None = None
    troubles: tuple[str, ...] = ()
    """What keeps it from continuing, in words."""

    is_stopped: bool = False
    holds_lock: bool = False
    """Whether its reporter cannot run because something holds the interpreter lock."""

    problem: str = ""
    """Why its stack is not known."""

    @property
    def is_working(self) -> bool:
        """Whether it, or what it started, may come to an end by itself."""
        return self.cpu >= IDLE_CPU or bool(self.work)

    @property
    def calls(self) -> tuple[Call, ...]:
        """Calls of it that have not ended."""
        return self.activity.calls if self.activity is not None else ()

    def to_json(self) -> dict[str, Any]:
        """Return plain values, for programs and other hosts."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any], *, shift_s: float = 0.0) -> Observation:
        """Undo `to_json`, for one of another host whose monotonic clock is `shift_s` behind."""
        location, activity = values["location"], values["activity"]
        frames = tuple(Frame(**frame) for frame in location["frames"])
        return cls(
            **{
                **values,
                "at": values["at"] + shift_s,
                "location": Location(**{**location, "frames": frames}),
                "activity": None if activity is None else activity_from(activity, shift_s),
                "troubles": tuple(values["troubles"]),
            }
        )


def observe(processes: Sequence[Watched]) -> list[Observation]:
    """Observe every process once."""
    before = [state_of(process.pid) for process in processes]
    usage = [ProcessUsage.measure(process.pid) for process in processes]
    started = time.monotonic()
    time.sleep(LOOK_S)
    # Before stacks are read: some ranks write theirs themselves.
    used_s = time.monotonic() - started
    work = [ProcessUsage.measure(p.pid).describe_since(u, used_s) for p, u in zip(processes, usage, strict=True)]
    with ThreadPoolExecutor(4) as pool:
        seen = list(pool.map(_observe_process, processes, before, [started] * len(before)))
    return [replace(o, work="" if o.ended else words) for o, words in zip(seen, work, strict=True)]


def _observe_process(process: Watched, before: ProcessState, started: float) -> Observation:
    state, now = state_of(process.pid), time.monotonic()
    cpu = max(0, state.cpu_ns - before.cpu_ns) / 1e9 / (now - started)
    if process.ended or state.is_gone:
        ended = process.ended or tr("has ended")
        return Observation(
            title=process.title,
            role=process.role,
            pid=process.pid,
            location=Location(kind="unknown"),
            at=now,
            ended=ended,
        )
    stacks = read_stacks(process.pid, is_stopped=state.is_stopped)
    location = location_of(stacks)
    activity = _activity_of(process.pid)
    troubles = troubles_of(process.pid, state)
    is_silent = activity is not None and now - activity.looked_at > activity.interval_s + _SILENT_S
    # A thread that computes holds the lock too, and lets go of it every few milliseconds.
    keeps_lock = (is_silent or cpu < IDLE_CPU) if stacks.main_holds_lock else is_silent and not stacks.is_lock_known
    holds_lock = keeps_lock and not state.is_stopped and location.kind not in WAITS
    if location.kind == "data":
        troubles += _troubles_of_workers(process.pid)
    return Observation(
        title=process.title,
        role=process.role,
        pid=process.pid,
        location=location,
        at=now,
        cpu=cpu,
        activity=activity,
        troubles=tuple(troubles),
        is_stopped=state.is_stopped,
        holds_lock=holds_lock,
        problem=stacks.problem,
    )


def _activity_of(pid: int) -> Activity | None:
    with contextlib.suppress(OSError, ValueError):
        reader = ActivityReader(pid)
        try:
            return reader.read()
        finally:
            reader.close()
    return None


def _troubles_of_workers(pid: int) -> list[str]:
    """Say where the data workers of a rank are that waits for them."""
    troubled: dict[str, list[int]] = {}
    located: dict[str, list[int]] = {}
    for child in proc.children(pid)[:_MAX_WORKERS]:
        state = state_of(child)
        if troubles := troubles_of(child, state):
            troubled.setdefault(troubles[0], []).append(child)
            continue
        stacks = read_stacks(child)
        location = location_of_frames(_of_dataset(stacks.main)) if stacks.main else None
        if location is not None and location.source:
            located.setdefault(str(location), []).append(child)
    return [
        *(
            tr("its data worker (pid {pids}): {trouble}", pids=_join_pids(pids), trouble=trouble)
            for trouble, pids in troubled.items()
        ),
        *(
            tr("its data worker (pid {pids}) is at {place}", pids=_join_pids(pids), place=location)
            for location, pids in located.items()
        ),
    ]


def _join_pids(pids: Sequence[int]) -> str:
    return ", ".join(map(str, pids))


def _of_dataset(frames: Sequence[Frame]) -> Sequence[Frame]:
    """The frames below the loop of a data worker: what started it is the script's line in the rank."""
    ends = [n for n, frame in enumerate(frames) if frame.function.endswith("_worker_loop")]
    return frames[: ends[0]] if ends else frames
