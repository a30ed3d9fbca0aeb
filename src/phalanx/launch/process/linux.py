"""Linux process calls: prctl, subreaper, kill trees, signal handling."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from types import FrameType

from phalanx.cluster import proc

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

TRACKER_WAIT_S = 1.0
"""Seconds that a resource tracker of Python gets to remove what processes that were killed have left."""

KILL_WAIT_S = 5.0
"""Seconds after which a process that the kernel will not end (stuck in a device) is given up."""


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}, {value}): {os.strerror(code)}")


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, so that none can be lost."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Have the kernel SIGKILL this process when `parent`, its present parent, dies.

    The parent may have died before the call, hence the second look.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def reap() -> list[tuple[int, int]]:
    """Collect every child that has ended, as (pid, wait status)."""
    ended = []
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended.append((pid, status))
    return ended


def is_resource_tracker(pid: int) -> bool:
    """Return whether `pid` is the process by which Python removes semaphores and shared memory of others that ended."""
    return any("multiprocessing.resource_tracker import main" in word for word in proc.command_line(pid))


def kill_descendants() -> None:
    """SIGKILL everything below this process and wait until it is gone, `KILL_WAIT_S` at most.

    Resource trackers end by themselves when all that they track for has ended, and take its files in /dev/shm along.
    """
    started = time.monotonic()
    while (pids := proc.descendants(os.getpid())) and time.monotonic() < started + KILL_WAIT_S:
        if time.monotonic() < started + TRACKER_WAIT_S:
            pids = [pid for pid in pids if not is_resource_tracker(pid)]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reap()
        time.sleep(0.005)
    reap()


class StopSignals:
    """Remembers SIGINT, SIGTERM and SIGHUP instead of acting on them.

    A SIGHUP that was ignored already stays ignored: under nohup a closed terminal must not end the job.
    """

    def __init__(self) -> None:
        self.woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.pending: list[int] = []
        for number in _STOPS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._remember)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        self.pending.append(number)

    def clear(self) -> None:
        """Empty the pipe that wakes the event loop."""
        os.read(self.woken, 4096)

    def take(self) -> int:
        """Return the first signal that came and forget it, or 0."""
        return self.pending.pop(0) if self.pending else 0
