"""`Reading`: what /proc, the control group and a rank itself say of its time so far, at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.cluster import proc
from phalanx.cluster.cgroup import ControlGroups
from phalanx.launch.rank.activity import Activity


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Counters of one rank; times are seconds of its main thread."""

    at: float
    """When, on the monotonic clock."""

    cpu_s: float
    """It ran."""

    queued_s: float
    """It could have run, and something else had the core, or its quota was used up."""

    throttled_s: float
    """Its control group was held back for its quota."""

    uninterruptible_s: float
    """It was asleep in the kernel (state D): for a disk, or for a page."""

    faults: int
    """Pages that had to be read from a disk."""

    swapped_bytes: int
    cores: float | None
    """The quota; None without one."""

    activity: Activity
    """What the rank says of itself."""


class RankCounters:
    """Reads the counters of one process from outside.

    Args:
        pid: The process.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._groups = ControlGroups.of_process(pid)
        self._uninterruptible_s = 0.0

    def sample_state(self, seconds: float) -> None:
        """Look at the state of the main thread, which counts for the time since the last look."""
        if proc.state(self._pid) == "D":
            self._uninterruptible_s += seconds

    def refresh(self) -> None:
        """Look again in which control groups the process is."""
        self._groups.refresh()

    def read(self, at: float, activity: Activity) -> Reading | None:
        """Return the counters now, or None when the process is gone."""
        times = proc.main_thread_ns(self._pid)
        if times is None or proc.state(self._pid) in (None, "Z", "X"):
            return None
        return Reading(
            at=at,
            cpu_s=times[0] / 1e9,
            queued_s=times[1] / 1e9,
            throttled_s=self._groups.throttled_seconds(),
            uninterruptible_s=self._uninterruptible_s,
            faults=proc.major_faults(self._pid),
            swapped_bytes=proc.status_bytes(proc.status(self._pid), "VmSwap"),
            cores=self._groups.cores(),
            activity=activity,
        )
