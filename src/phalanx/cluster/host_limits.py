"""`HostLimits`: what this host, or its container, lets a job have: shared memory, open files, cores, memory, disk."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from phalanx.cluster.disk_space import free_bytes

SHARED_MEMORY = Path("/dev/shm")
CGROUPS = Path("/sys/fs/cgroup")

SHARED_MEMORY_WANTED = 256 << 20
"""Room in /dev/shm below which batches of loader workers may not fit; a container has 64 MB unless told otherwise."""

_NO_LIMIT = 1 << 60
"""What version 1 says where there is none: the largest number of whole pages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostLimits:
    """Facts, read from files of the system in a millisecond."""

    shared_memory: int | None
    """Bytes of /dev/shm; None where there is none."""

    shared_memory_free: int
    open_files: int
    """Files that a process may open."""

    open_files_most: int
    """What a process may raise that to."""

    cores: int
    """Cores this process may run on."""

    cpu_quota: float | None
    """Cores' worth of time that the cgroup gives, as `docker run --cpus`; None without a limit."""

    memory_limit: int | None
    """Bytes that the cgroup gives, as `docker run --memory`; None without a limit."""

    memory_used: int
    """Bytes in use there, file cache not counted."""

    disk_free: int
    """Bytes free where the job's files go."""

    @classmethod
    def read(cls, folder: str | Path = ".") -> HostLimits:
        """Return the limits of this process.

        Args:
            folder: Where the job's files go.
        """
        total, free = _shared_memory()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit, used = memory_limit()
        return cls(
            shared_memory=total,
            shared_memory_free=free,
            open_files=soft,
            open_files_most=hard,
            cores=len(os.sched_getaffinity(0)),
            cpu_quota=cpu_quota(),
            memory_limit=limit,
            memory_used=used,
            disk_free=free_bytes(folder),
        )

    @property
    def is_throttled(self) -> bool:
        """Whether threads on all the cores would use the quota up long before its period ends."""
        return self.cpu_quota is not None and self.cpu_quota < self.cores * 0.75


def has_little_shared_memory() -> bool:
    """Return whether batches of loader workers may not fit into /dev/shm; False on a system that does not say."""
    try:
        return _shared_memory()[1] < SHARED_MEMORY_WANTED
    except OSError:
        return False


def _shared_memory() -> tuple[int | None, int]:
    if not SHARED_MEMORY.is_dir():
        return None, 0
    disk = os.statvfs(SHARED_MEMORY)
    return disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize


def cpu_quota(root: Path = CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """Return the cores' worth of time that this process and those beside it may use together; None without a limit."""
    quotas = []
    for folder in _folders(root, membership, "cpu"):
        of_version_1 = f"{_text(folder / 'cpu.cfs_quota_us')} {_text(folder / 'cpu.cfs_period_us')}"
        words = (_text(folder / "cpu.max") or of_version_1).split()
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def memory_limit(root: Path = CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> tuple[int | None, int]:
    """Return the bytes that this process and those beside it may use, None without a limit, and those in use."""
    limits = []
    for folder in _folders(root, membership, "memory"):
        limit = _text(folder / "memory.max") or _text(folder / "memory.limit_in_bytes")
        if limit.isdecimal() and int(limit) < _NO_LIMIT:
            used = _text(folder / "memory.current") or _text(folder / "memory.usage_in_bytes")
            limits.append((int(limit), max(0, int(used or 0) - _file_cache(folder))))
    return min(limits, default=(None, 0))


def _file_cache(folder: Path) -> int:
    """Bytes of files that the kernel gives up when memory runs short."""
    rows = dict(line.split() for line in _text(folder / "memory.stat").splitlines() if line.count(" ") == 1)
    return int(rows.get("total_inactive_file") or rows.get("inactive_file") or 0)


def _folders(root: Path, membership: Path, controller: str) -> Iterator[Path]:
    """Yield the cgroups of this process that may limit it, of either version, the innermost first.

    In a container with a namespace of its own the innermost is `root` itself, whatever `membership` says.
    """
    for line in _text(membership).splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        base = next((root / name for name in (names, controller) if name and (root / name).is_dir()), root)
        for at in (Path(path), *Path(path).parents):
            yield base / str(at).lstrip("/")


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
