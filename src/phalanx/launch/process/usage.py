"""`ProcessUsage`: what a process and its children did since a moment, by /proc."""

from __future__ import annotations

import os
from dataclasses import dataclass

from phalanx.cluster import proc

_STOPPED = {"T": "stopped by a signal", "t": "stopped by a debugger", "Z": "ended", "X": "ended"}
_IDLE_SHARE = 0.02
"""Processor time, as a share of the time passed, below which a process does nothing of its own."""

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def stopped_state(pid: int) -> str:
    """Return in words why a process cannot run, or "" while it can."""
    state = proc.state(pid)
    return "gone" if state is None else _STOPPED.get(state, "")


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """Processor time and bytes of I/O of a process and everything below it."""

    cpu_s: float
    io_bytes: int

    @classmethod
    def measure(cls, pid: int) -> ProcessUsage:
        """Return what `pid` and everything below it have used so far."""
        pids = [pid, *proc.descendants(pid)]
        return cls(sum(map(proc.cpu_seconds, pids)), sum(map(proc.io_bytes, pids)))

    def describe_since(self, before: ProcessUsage, seconds: float) -> str:
        """Return what was done since `before`, in words, or "" for nothing worth the name."""
        # A child that ended takes its figures along, unless it was waited for.
        cpu_s = self.cpu_s - before.cpu_s
        if abs(cpu_s) > _IDLE_SHARE * seconds + 2 * _TICK_S:
            return f"is computing ({abs(cpu_s):.1f} s of CPU in the last {seconds:.1f} s)"
        if self.io_bytes != before.io_bytes:
            return f"reads or writes ({abs(self.io_bytes - before.io_bytes)} bytes in the last {seconds:.1f} s)"
        return ""
