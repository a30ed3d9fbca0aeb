"""`Reading`: what /proc, the control group and a rank itself say of its time so far, at one moment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from phalanx.cluster.cgroup import ControlGroups
from phalanx.launch.process.activity import Activity


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
        self._proc = Path(f"/proc/{pid}")
        self._main = self._proc / "task" / str(pid)
        self._groups = ControlGroups(self._proc)
        self._uninterruptible_s = 0.0

    def sample_state(self, seconds: float) -> None:
        """Look at the state of the main thread, which counts for the time since the last look."""
        try:
            state = _stat(self._main)[0]
        except (OSError, IndexError):
            return
        if state == "D":
            self._uninterruptible_s += seconds

    def refresh(self) -> None:
        """Look again in which control groups the process is."""
        self._groups.refresh()

    def read(self, at: float, activity: Activity) -> Reading | None:
        """Return the counters now, or None when the process is gone."""
        try:
            ran, queued = (self._main / "schedstat").read_text(encoding="ascii").split()[:2]
            fields = _stat(self._proc)
            status = (self._proc / "status").read_text(encoding="utf-8", errors="replace")
        except (OSError, ValueError):
            return None
        if len(fields) < 10 or fields[0] in "ZX":
            return None
        swapped = next((line.split()[1] for line in status.splitlines() if line.startswith("VmSwap:")), "0")
        return Reading(
            at=at,
            cpu_s=int(ran) / 1e9,
            queued_s=int(queued) / 1e9,
            throttled_s=self._groups.throttled_seconds(),
            uninterruptible_s=self._uninterruptible_s,
            faults=int(fields[9]),
            swapped_bytes=int(swapped) << 10,
            cores=self._groups.cores(),
            activity=activity,
        )


def _stat(folder: Path) -> list[str]:
    """Return the fields of `stat` from the state on; the name before may have any character."""
    return (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
