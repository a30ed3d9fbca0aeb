"""`state_of`: why a process does not continue, by /proc: stopped, asleep in the kernel, swapped out, held back."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.cluster import proc
from phalanx.cluster.cgroup import ControlGroups
from phalanx.i18n import tr
from phalanx.units import format_bytes

_SWAPPED_SHARE = 0.2
"""Part of a process's memory in swap that is worth a word."""

_THROTTLED_SHARE = 0.2
"""Part of a cgroup's periods in which it was held back that is worth a word."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessState:
    """What the system reports of a process."""

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
    letter, times = proc.state(pid), proc.main_thread_ns(pid)
    if letter is None or times is None:
        return ProcessState(letter="", cpu_ns=0)
    return ProcessState(letter=letter, cpu_ns=times[0])


def troubles_of(pid: int, state: ProcessState) -> list[str]:
    """Return in words what keeps a process from continuing, as far as the kernel says it."""
    troubles = []
    if state.is_stopped:
        troubles.append(tr("it is stopped by a signal or a debugger (kill -CONT {pid} lets it continue)", pid=pid))
    if state.letter == "D":
        where = proc.wait_channel(pid)
        troubles.append(tr("it waits in the kernel, for a disk or a network file system ({where})", where=where or "?"))
    status = proc.status(pid)
    swapped, resident = (proc.status_bytes(status, name) for name in ("VmSwap", "VmRSS"))
    if swapped > _SWAPPED_SHARE * (swapped + resident):
        troubles.append(tr("{size} of its memory are swapped out", size=format_bytes(swapped)))
    if (share := ControlGroups.of_process(pid).throttled_share()) > _THROTTLED_SHARE:
        troubles.append(tr("its cgroup was held back in {share:.0%} of all periods (cpu.max)", share=share))
    return troubles
