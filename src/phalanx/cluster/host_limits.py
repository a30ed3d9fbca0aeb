"""`HostLimits`: what this host, or its container, lets a job have: shared memory, open files, cores, memory, disk."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from phalanx.cluster.cgroup import ControlGroups
from phalanx.cluster.disk_space import free_bytes

SHARED_MEMORY = Path("/dev/shm")

OPEN_FILES_ADVISED = 65536


@dataclass(frozen=True, kw_only=True, slots=True)
class Requirement:
    """How much a job needs of something that a host gives it."""

    needed: int
    """Below this nothing runs: `phalanx doctor` fails."""

    scarce: int
    """Below this many jobs fail: every start warns."""

    recommended: int
    """Below this large jobs may fail: `phalanx doctor` warns."""


# A container has 64 MB of shared memory unless told otherwise, in which batches of loader workers may not fit.
NEEDS_SHARED_MEMORY = Requirement(needed=1 << 20, scarce=256 << 20, recommended=1 << 30)
NEEDS_OPEN_FILES = Requirement(needed=256, scarce=1024, recommended=4096)
NEEDS_MEMORY = Requirement(needed=0, scarce=256 << 20, recommended=2 << 30)
NEEDS_DISK = Requirement(needed=64 << 20, scarce=0, recommended=5 << 30)


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
        groups = ControlGroups()
        limit, used = groups.memory_limit()
        return cls(
            shared_memory=total,
            shared_memory_free=free,
            open_files=soft,
            open_files_most=hard,
            cores=len(os.sched_getaffinity(0)),
            cpu_quota=groups.cores(),
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
        return _shared_memory()[1] < NEEDS_SHARED_MEMORY.scarce
    except OSError:
        return False


def _shared_memory() -> tuple[int | None, int]:
    if not SHARED_MEMORY.is_dir():
        return None, 0
    disk = os.statvfs(SHARED_MEMORY)
    return disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
