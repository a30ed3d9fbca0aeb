"""Memory of this host and of this process, as Linux tells it in /proc."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

_PAGE_BYTES = resource.getpagesize()


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """What this process has, in bytes (man 5 proc, statm)."""

    address_space: int
    """What RLIMIT_AS limits."""

    resident: int
    data: int
    """What RLIMIT_DATA limits: data and stacks."""


def process_memory() -> ProcessMemory:
    """Return the memory of this process."""
    pages = [int(count) for count in Path("/proc/self/statm").read_text(encoding="ascii").split()]
    return ProcessMemory(pages[0] * _PAGE_BYTES, pages[1] * _PAGE_BYTES, pages[5] * _PAGE_BYTES)


def total_bytes() -> int:
    """Return the memory of this host."""
    return _meminfo()["MemTotal"]


def available_bytes() -> int | None:
    """Return what processes of this host may still take without swapping; None where the kernel does not tell."""
    return _meminfo().get("MemAvailable")


def _meminfo() -> dict[str, int]:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    pairs = (line.partition(":") for line in lines)
    return {name: int(value.split()[0]) * 1024 for name, _, value in pairs}
