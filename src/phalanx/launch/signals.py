"""Signals that end a job, as something an event loop can wait for."""

from __future__ import annotations

import os
import signal
from types import FrameType

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
