"""`input_time`: the seconds that this process spends on its input, so that a slow rank can be told why it is slow."""

from __future__ import annotations

import threading
import time
from types import TracebackType


class InputTime:
    """Seconds inside loaders, of the thread that trains. A loader inside another counts once.

    It is a context around the loading of one batch.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        """All that was spent so far, by the clock of the host."""

        self.cpu_seconds = 0.0
        """Of those, what that thread used of a processor; the rest it waited for workers, disks or networks."""

        self._depth = 0
        self._began = self._cpu_began = 0.0

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._depth += 1
        if self._depth == 1:
            self._began, self._cpu_began = time.perf_counter(), time.thread_time()

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._depth -= 1
        if self._depth == 0:
            self.seconds += time.perf_counter() - self._began
            self.cpu_seconds += time.thread_time() - self._cpu_began


input_time = InputTime()
"""That of this process."""
