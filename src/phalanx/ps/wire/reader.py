"""Who reads what a server sends: whoever waits for an answer, and a thread while nobody does.

One that waits reads the socket itself, which saves two switches between threads for every answer. The thread is there
because answers must be taken in any case: a server that cannot write them reads no requests either, and one that is
gone should be noticed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from phalanx.ps.wire.frame import FrameError
from phalanx.ps.wire.link import ServerLink

_IDLE_S = 0.2
"""After so long without anybody reading the thread does."""


class ReplyReader:
    """Takes frames off one link, in one thread at a time.

    Args:
        link: The link.
        lock: The connection's lock.
        changed: Over that lock; notified after every frame.
        take: Reads a frame of the link before a deadline, and handles it.
        lost: Called by the thread as its last act, with why the link can be read no more.
        name: Name of the thread.
    """

    def __init__(
        self,
        link: ServerLink,
        *,
        lock: threading.RLock,
        changed: threading.Condition,
        take: Callable[[ServerLink, float | None], None],
        lost: Callable[[ServerLink, str], None],
        name: str,
    ) -> None:
        self.link = link
        self.thread = threading.Thread(target=self._stand_in, name=name, daemon=True)
        self._changed, self._called = changed, threading.Condition(lock)
        self._take, self._lost = take, lost
        self._is_reading = self._was_read = self._has_waiter = self._is_wanted = False
        self._end: str | None = None

    def take_turn(self, until: float) -> bool:
        """Return True if it is for the caller to `read` now, else wait for another's frame. Runs with the lock held.

        Args:
            until: When to stop waiting, on the clock of `time.monotonic`.
        """
        if not self._is_reading and self._end is None:
            self._is_reading = self._was_read = True
            return True
        self._has_waiter = True
        self._changed.wait(max(0.0, until - time.monotonic()))
        return False

    def read(self, deadline: float | None) -> None:
        """Take one frame, if one begins before `deadline`, and end the caller's turn."""
        why: str | None = None
        try:
            if self.link.channel.has_bytes(deadline):
                why = "reading its answer was interrupted"
                self._take(self.link, deadline)
                why = None
        except (OSError, FrameError, MemoryError) as error:
            why = error_text(error)
        finally:
            with self._changed:
                self._is_reading = False
                self._end = self._end or why
                self._changed.notify_all()
                if self._end or self._is_wanted:
                    self._called.notify()

    def read_on(self) -> None:
        """Let the thread read soon: the caller waits for what answers that nobody takes may hold up."""
        with self._changed:
            self._is_wanted = True
            self._called.notify()

    def interrupt(self) -> None:
        """Break the link: whoever reads or writes stops, and the thread comes to its end."""
        self.link.channel.interrupt()
        self.read_on()

    def _stand_in(self) -> None:
        """Read while nobody waits, until the link is broken."""
        goes_on = False
        while True:
            with self._changed:
                if not goes_on:
                    self._was_read = False
                    self._called.wait_for(self._is_due, _IDLE_S)
                if self._end:
                    break
                goes_on = False
                if self._is_reading or (self._was_read and not self._is_wanted):
                    continue
                self._is_reading, self._has_waiter, self._is_wanted = True, False, False
            self.read(None)
            goes_on = not self._has_waiter
        self._lost(self.link, self._end)

    def _is_due(self) -> bool:
        return self._end is not None or (self._is_wanted and not self._is_reading)


def error_text(error: Exception) -> str:
    """Return the text of an error, without its number."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
