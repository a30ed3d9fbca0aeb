"""What /proc says of a process that does not go on: stopped, asleep in the kernel, swapped out, held back."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from phalanx.i18n import tr
from phalanx.units import format_bytes

_SWAPPED_SHARE = 0.2
"""Part of a process's memory in swap that is worth a word."""

_THROTTLED_SHARE = 0.2
"""Part of a cgroup's periods in which it was held back that is worth a word."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessState:
    """One look at a process."""

    letter: str
    """R running, S sleeping, D asleep in the kernel, T stopped, Z ended; empty when it is gone."""

    cpu_ns: int
    """Processor time of its main thread."""

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger holds it."""
        return self.letter in ("T", "t")

    @property
    def is_gone(self) -> bool:
        """Whether it has ended."""
        return self.letter in ("", "Z", "X")


def state_of(pid: int) -> ProcessState:
    """Return the state of a process now."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            letter = file.read().rpartition(")")[2].split()[0]
        with open(f"/proc/{pid}/task/{pid}/schedstat", encoding="ascii") as file:
            return ProcessState(letter=letter, cpu_ns=int(file.read().split()[0]))
    except (OSError, IndexError):
        return ProcessState(letter="", cpu_ns=0)


def troubles_of(pid: int, state: ProcessState) -> list[str]:
    """Return in words what keeps a process from going on, as far as the kernel says it."""
    troubles = []
    if state.is_stopped:
        troubles.append(tr("it is stopped by a signal or a debugger (kill -CONT {pid} lets it go on)", pid=pid))
    if state.letter == "D":
        where = _text(f"/proc/{pid}/wchan").strip("0 \n")
        troubles.append(tr("it waits in the kernel, for a disk or a network file system ({where})", where=where or "?"))
    if (swapped := _memory(pid, "VmSwap")) > _SWAPPED_SHARE * (swapped + _memory(pid, "VmRSS")):
        troubles.append(tr("{size} of its memory are swapped out", size=format_bytes(swapped)))
    if (share := _throttled_share(pid)) > _THROTTLED_SHARE:
        troubles.append(tr("its cgroup was held back in {share:.0%} of all periods (cpu.max)", share=share))
    return troubles


def children_of(pid: int) -> list[int]:
    """Return the processes that a process started and that have not ended, such as data workers."""
    pids = []
    for task in _names_of(f"/proc/{pid}/task"):
        pids += [int(child) for child in _text(f"/proc/{pid}/task/{task}/children").split()]
    return [child for child in pids if not state_of(child).is_gone]


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with; empty where we may not read it."""
    with contextlib.suppress(OSError):
        pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        return dict(pair.partition("=")[::2] for pair in pairs if "=" in pair)
    return {}


def _names_of(folder: str) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(folder)
    return []


def _text(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="utf-8", errors="replace")
    return ""


def _memory(pid: int, name: str) -> int:
    line = next((line for line in _text(f"/proc/{pid}/status").splitlines() if line.startswith(f"{name}:")), "")
    return int(line.split()[1]) << 10 if line else 0


def _throttled_share(pid: int) -> float:
    """Part of the periods in which the cgroup of a process (version 2) used all the time it may."""
    path = _text(f"/proc/{pid}/cgroup").rpartition("0::")[2].strip()
    lines = [line.split() for line in _text(f"/sys/fs/cgroup{path}/cpu.stat").splitlines()]
    numbers = {line[0]: int(line[1]) for line in lines if len(line) == 2}
    periods = numbers.get("nr_periods", 0)
    return numbers.get("nr_throttled", 0) / periods if periods else 0.0
