"""`ControlGroups`: limits of a process's control groups: cores (CFS quota) and memory, of version 1 and 2.

`man 7 cgroups`. A container, a Kubernetes pod with limits and a Slurm step with constrained cores are control groups. A
limit of any group above holds too, as far as it can be seen from here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

_MEMORY_FILES = (("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current"))

_UNLIMITED = 1 << 60
"""Bytes above which a limit of version 1, which has no word for none, is none."""


class ControlGroups:
    """The control groups of a process.

    Args:
        proc: What the kernel says of it: the folder with its `cgroup` and `mountinfo`; of this process when omitted.
    """

    def __init__(self, proc: Path = Path("/proc/self")) -> None:
        self._proc = proc
        self.refresh()

    @classmethod
    def of_process(cls, pid: int) -> ControlGroups:
        """Return those of a process."""
        return cls(Path(f"/proc/{pid}"))

    def refresh(self) -> None:
        """Look again which groups they are: a process may be moved."""
        self._folders = {kind: list(_folders(self._proc, kind)) for kind in ("cpu", "cpuacct", "memory", "")}

    def cores(self) -> float | None:
        """Return the cores that the processes of the tightest group may use together; None without a limit."""
        quotas = [_quota_v1(folder) for folder in self._folders["cpu"]]
        quotas += [_quota_v2(folder) for folder in self._folders[""]]
        return min((quota for quota in quotas if quota is not None), default=None)

    def cpu_seconds(self) -> float:
        """Return the CPU seconds that the group used so far; those of this process where that is not counted."""
        for folder in self._folders["cpuacct"][:1]:
            # Where the group of the limit is not the group that is counted, others are counted too.
            if self._folders["cpu"] and self._folders["cpu"][0].name != folder.name:
                break
            if (used := _number(folder / "cpuacct.usage")) is not None and self._folders["cpu"]:
                return used / 1e9
        for folder in self._folders[""][:1]:
            if not self._folders["cpu"] and (used := _field(folder / "cpu.stat", "usage_usec")) is not None:
                return used / 1e6
        return time.process_time()

    def throttled_seconds(self) -> float:
        """Return how long the processes of the group that was held back most might not run so far, for its quota."""
        times = [(_field(folder / "cpu.stat", "throttled_time") or 0.0) / 1e9 for folder in self._folders["cpu"]]
        times += [(_field(folder / "cpu.stat", "throttled_usec") or 0.0) / 1e6 for folder in self._folders[""]]
        return max(times, default=0.0)

    def throttled_share(self) -> float:
        """Return the part of its periods in which the group that was held back most used all the time it may."""
        folders = [*self._folders["cpu"], *self._folders[""]]
        counts = [(_field(f / "cpu.stat", "nr_throttled"), _field(f / "cpu.stat", "nr_periods")) for f in folders]
        return max((throttled / periods for throttled, periods in counts if throttled and periods), default=0.0)

    def memory_limit(self) -> tuple[int | None, int]:
        """Return the bytes that the processes of the tightest group may use, None without a limit, and those in use.

        Files that were read stay in memory until it is needed, and do not count.
        """
        return min(self._memory_limits(), default=(None, 0))

    def memory_left(self) -> float | None:
        """Return the bytes that the processes of the tightest group may still take; None without a limit."""
        return min((float(limit - used) for limit, used in self._memory_limits()), default=None)

    def _memory_limits(self) -> Iterator[tuple[int, int]]:
        """Yield the limit of each group that has one, and the bytes in use."""
        for folder in (*self._folders["memory"], *self._folders[""]):
            for maximum, current in _MEMORY_FILES:
                limit, used = _number(folder / maximum), _number(folder / current)
                if limit is not None and limit < _UNLIMITED:
                    stat = folder / "memory.stat"
                    # Version 1 counts the groups below by another name.
                    cached = _field(stat, "total_inactive_file") or _field(stat, "inactive_file") or 0.0
                    yield int(limit), max(0, int((used or 0.0) - cached))


def _folders(proc: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the groups of one controller that this process is in, its own first.

    Args:
        proc: Folder of the process.
        controller: Its name; empty for version 2, which has one hierarchy for all.
    """
    path = _path(proc, controller)
    mount = _mount(proc, controller)
    if path is None or mount is None:
        return
    point, root = mount
    inside = path.relative_to(root) if path.is_relative_to(root) else Path()
    folder = point / inside
    if not folder.is_dir():  # the process sees its own group as the root
        folder = point
    while True:
        yield folder
        if folder == point:
            return
        folder = folder.parent


def _path(proc: Path, controller: str) -> Path | None:
    """Return the path of the process's group in its hierarchy."""
    for line in _lines(proc / "cgroup"):
        parts = line.split(":", 2)
        if len(parts) == 3 and controller in parts[1].split(",") and (controller or parts[0] == "0"):
            return Path("/" + parts[2].strip("/"))
    return None


def _mount(proc: Path, controller: str) -> tuple[Path, Path] | None:
    """Return where the hierarchy of a controller is mounted, and which of its folders that is."""
    for line in _lines(proc / "mountinfo"):
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        is_meant = controller in kind[2].split(",") if controller else True
        if kind[0] == ("cgroup" if controller else "cgroup2") and is_meant:
            return Path(fields[4]), Path("/" + fields[3].strip("/"))
    return None


def _quota_v1(folder: Path) -> float | None:
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota is not None and period and quota > 0 else None


def _quota_v2(folder: Path) -> float | None:
    words = next(iter(_lines(folder / "cpu.max")), "").split()
    return float(words[0]) / float(words[1]) if len(words) == 2 and words[0].isdigit() else None


def _number(path: Path) -> float | None:
    try:
        return float(next(iter(_lines(path)), ""))
    except ValueError:  # `max`, or no such file
        return None


def _field(path: Path, name: str) -> float | None:
    for line in _lines(path):
        word, _, value = line.partition(" ")
        if word == name:
            return float(value)
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
