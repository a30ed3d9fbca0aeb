"""`Activity`: what a rank says of the calls it is in, in memory that others can read while it is frozen.

The memory is an anonymous file of the rank, which others open through `/proc/PID/fd`: nothing is left when the rank is
killed, and who may look into the rank may read it. It has one writer; a reader that meets it in the middle of a change
sees an odd number, and looks again.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

NAME = "phalanx-activity"
"""What the file is called in `/proc/PID/fd`."""

_BYTES = 1 << 16
_HEAD = struct.Struct("=QQd")
"""Number of changes (odd in the middle of one), bytes of text, and the monotonic time when the rank last looked."""

_TRIES = 50

FIRST_STEPS = 3
FIRST_CALLS = 20
"""A rank that has made fewer steps, and fewer collectives, starts: it may compile, load data, or build a model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A call that has begun and not ended: a collective, a message, or a request to a server."""

    verb: str
    """all_reduce, recv, pull, ..."""

    backend: str = "shm"
    """What carries it: shm, gloo, nccl, or wire for requests to servers."""

    number: int
    """Of the call in its group; ranks of a group give the same number to what must be the same call."""

    group: str = ""
    """The group's name in torch with what carries it, such as `0@gloo`, or the server that is asked."""

    members: tuple[int, ...] = ()
    """Global ranks of the group; empty where they are not known."""

    detail: str = ""
    """dtype and shape, such as `float32[25557032]`."""

    label: str = ""
    """What it is for, where somebody said so (`comm.labels`)."""

    since: float
    """When it began, in seconds of the machine's monotonic clock."""

    missing: tuple[str, ...] = ()
    """Titles of the processes that it waits for, as far as its rank knows: `rank 1`, `server 0`."""

    is_collective: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """What a rank says of itself."""

    looked_at: float
    """When, on the monotonic clock; a rank that holds its interpreter lock, or is frozen, does not look any more."""

    interval_s: float = 1.0
    """How often it looks."""

    steps: int = 0
    """Optimizer steps so far."""

    step_s: float = 0.0
    """Median of the last of them; 0 before there are two."""

    begun: Mapping[str, int] = field(default_factory=dict)
    """Collectives that were begun, by group."""

    completed: Mapping[str, int] = field(default_factory=dict)
    calls: tuple[Call, ...] = ()

    input_s: float = 0.0
    """Seconds in loaders so far, of the thread that trains; this and what follows is of `TimeUse`."""

    input_cpu_s: float = 0.0
    """Of those, what it used of a processor."""

    collector_s: float = 0.0
    """Seconds of the garbage collector."""

    begun_calls_s: float = 0.0
    """Seconds while a collective of torch's own backends had not ended, to a tenth."""

    in_calls_s: float = 0.0
    """Seconds that the main thread waited in collectives over shared memory: for others, and for the bytes."""

    main_waits_s: Mapping[str, float] = field(default_factory=dict)
    """Of those, until the last rank had come, by that rank."""

    entered_waits_s: Mapping[str, float] = field(default_factory=dict)
    """The same from this rank's own entry, by whichever thread; its main thread may have computed meanwhile."""

    @property
    def progress(self) -> tuple[int, int, int]:
        """Numbers of which one grows with every step and with every collective."""
        return self.steps, sum(self.begun.values()), sum(self.completed.values())

    @property
    def is_starting(self) -> bool:
        """Whether it has made so few steps that nothing is usual yet."""
        return self.steps < FIRST_STEPS and self.progress[2] < FIRST_CALLS


class ActivityMemory:
    """The writer's side: made once by a rank, for as long as it lives."""

    def __init__(self) -> None:
        self._fd = os.memfd_create(NAME)
        os.ftruncate(self._fd, _BYTES)
        self._memory = mmap.mmap(self._fd, _BYTES)
        self._changes = 0
        self._text = b""

    def write(self, activity: Mapping[str, Any]) -> None:
        """Publish fields of an `Activity` but `looked_at`; the time is set in any case, the text only if it changed."""
        text = json.dumps(activity, default=asdict).encode()
        if text != self._text and len(text) <= _BYTES - _HEAD.size:
            _HEAD.pack_into(self._memory, 0, self._changes + 1, len(self._text), time.monotonic())
            self._memory[_HEAD.size : _HEAD.size + len(text)] = text
            self._changes += 2
            self._text = text
        _HEAD.pack_into(self._memory, 0, self._changes, len(self._text), time.monotonic())


class ActivityReader:
    """The reader's side, in another process.

    Args:
        pid: The rank.

    Raises:
        FileNotFoundError: If that process shows no activity (yet), or is gone.
        PermissionError: If it is not ours to look into.
    """

    def __init__(self, pid: int) -> None:
        with open(file_of(pid, NAME), "rb") as file:
            self._memory = mmap.mmap(file.fileno(), _BYTES, prot=mmap.PROT_READ)

    def read(self) -> Activity | None:
        """Return what the rank last said, or None before it said anything."""
        for _ in range(_TRIES):
            before = _HEAD.unpack_from(self._memory)
            text = self._memory[_HEAD.size : _HEAD.size + min(before[1], _BYTES)]
            if before[0] % 2 == 0 and _HEAD.unpack_from(self._memory)[0] == before[0]:
                return parse_activity(text, before[2]) if text else None
            time.sleep(1e-4)
        return None  # killed or stopped in the middle of a change

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()


def parse_activity(text: bytes, looked_at: float) -> Activity:
    """Return an activity from the JSON of one."""
    return activity_from({**json.loads(text), "looked_at": looked_at})


def activity_from(values: Mapping[str, Any], shift_s: float = 0.0) -> Activity:
    """Return an activity from its plain values, `shift_s` later: the monotonic clocks of two hosts differ."""
    calls = tuple(_call(call, shift_s) for call in values.get("calls", ()))
    return Activity(**{**values, "looked_at": values["looked_at"] + shift_s, "calls": calls})


def _call(values: dict[str, Any], shift_s: float) -> Call:
    since = values["since"] + shift_s
    return Call(**{**values, "since": since, "members": tuple(values["members"]), "missing": tuple(values["missing"])})


def file_of(pid: int, name: str) -> str:
    """Return the path of an anonymous file of a process, by its name.

    Raises:
        FileNotFoundError: If it has none, or is gone.
    """
    folder = f"/proc/{pid}/fd"
    for number in _numbers(folder):
        try:
            if os.readlink(f"{folder}/{number}").startswith(f"/memfd:{name}"):
                return f"{folder}/{number}"
        except FileNotFoundError:
            continue  # closed meanwhile
    raise FileNotFoundError(f"process {pid} has no file {name}")


def _numbers(folder: str) -> Sequence[str]:
    try:
        return os.listdir(folder)
    except ProcessLookupError as error:
        raise FileNotFoundError(folder) from error
