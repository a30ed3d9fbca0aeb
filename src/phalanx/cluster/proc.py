"""What /proc says of a process (state, parent, processor time, memory, children, ...) and of the host's memory.

See `man 5 proc`. Of a process that is gone, or that this user may not look into, it says nothing: None, 0 or empty.
"""

from __future__ import annotations

import contextlib
import os
import resource
from dataclasses import dataclass
from pathlib import Path

_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = resource.getpagesize()


def pids() -> list[int]:
    """Return every process of this host."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def stat(pid: int) -> list[str] | None:
    """Return the fields of `stat` from the state on; the name before may have any character."""
    fields = _text(pid, "stat").rpartition(")")[2].split()
    return fields or None


def state(pid: int) -> str | None:
    """Return the state letter of `pid` (`R` runs, `T` is stopped, `Z` has ended, ...), that of its main thread."""
    fields = stat(pid)
    return None if fields is None else fields[0]


def parent(pid: int) -> int:
    """Return the process that `pid` is a child of."""
    fields = stat(pid)
    return 0 if fields is None else int(fields[1])


def start_ticks(pid: int) -> int | None:
    """Return when `pid` started, in clock ticks since boot, or None when it is gone or a zombie.

    A pid with its start time names one process for good, a pid alone does not.
    """
    fields = stat(pid)
    return None if fields is None or fields[0] == "Z" else int(fields[19])


def major_faults(pid: int) -> int:
    """Return how many pages of `pid` had to be read from a disk so far."""
    fields = stat(pid)
    return 0 if fields is None else int(fields[9])


def cpu_seconds(pid: int) -> float:
    """Return the processor time of `pid` and of children that it collected."""
    fields = stat(pid)
    return 0.0 if fields is None else sum(map(int, fields[11:15])) / _TICKS_A_SECOND


def main_thread_ns(pid: int) -> tuple[int, int] | None:
    """Return for how long the main thread of `pid` ran, and for how long it could have run and did not."""
    times = _text(pid, f"task/{pid}/schedstat").split()
    return (int(times[0]), int(times[1])) if len(times) >= 2 else None


def io_bytes(pid: int) -> int:
    """Return the bytes that `pid` has read and written, sockets and pipes included."""
    counters = dict(line.split() for line in _text(pid, "io").splitlines())
    return int(counters.get("rchar:", 0)) + int(counters.get("wchar:", 0))


def memory_bytes(pid: int) -> int:
    """Return the resident memory of `pid`, each page divided by those who share it (PSS)."""
    lines = _text(pid, "smaps_rollup").splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)


def status(pid: int) -> dict[str, str]:
    """Return the fields of `status` by their names."""
    pairs = (line.partition(":") for line in _text(pid, "status").splitlines())
    return {name: value.strip() for name, _, value in pairs}


def status_bytes(fields: dict[str, str], name: str) -> int:
    """Return an amount of memory of `status`, such as `VmRSS`."""
    return int(fields[name].split()[0]) << 10 if name in fields else 0


def wait_channel(pid: int) -> str:
    """Return the function of the kernel that `pid` is asleep in."""
    return _text(pid, "wchan").strip("0 \n")


def command_line(pid: int) -> list[str]:
    """Return the words that `pid` was started with."""
    text = _text(pid, "cmdline").rstrip("\0")
    return text.split("\0") if text else []


def environment(pid: int) -> dict[str, str]:
    """Return the environment that `pid` was started with."""
    pairs = _text(pid, "environ").split("\0")
    return dict(pair.partition("=")[::2] for pair in pairs if "=" in pair)


def is_readable(pid: int) -> bool:
    """Return whether this user may look into `pid`."""
    return os.access(f"/proc/{pid}/environ", os.R_OK)


def children(pid: int) -> list[int]:
    """Return the processes that `pid` started and that have not ended, such as data workers."""
    started: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            started += map(int, _text(pid, f"task/{task}/children").split())
    return [child for child in started if state(child) not in (None, "Z", "X")]


def descendants(root: int) -> list[int]:
    """Return the pids below `root`, parents before children, zombies left out."""
    children_of: dict[int, list[int]] = {}
    zombies = set()
    for pid in pids():
        fields = stat(pid)
        if fields is None:
            continue
        children_of.setdefault(int(fields[1]), []).append(pid)
        if fields[0] == "Z":
            zombies.add(pid)
    below: list[int] = []
    queue = [root]
    while queue:
        own = children_of.get(queue.pop(0), [])
        below += own
        queue += own
    # A process whose first thread ended before another is a zombie that still has its children.
    return [pid for pid in below if pid not in zombies]


def _text(pid: int, name: str) -> str:
    """Return a file of a process; of one that is gone, or none of ours, nothing."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read().decode(errors="replace")
    except OSError:
        return ""


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


def most_address_space() -> int:
    """Return the most bytes of address space that this process had at once (VmPeak)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmPeak:"))


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
