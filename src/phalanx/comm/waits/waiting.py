"""`waits`: the seconds that this process waits for other ranks, so that its own work can be timed without them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class WaitTimes:
    """Seconds inside collectives and waits for them, of the thread that trains. A wait inside another counts once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """All that was waited so far, by the clock of the host."""

        self.mark: Callable[[], Any] | None = None
        """Puts a mark into the stream of a device, where the device waits and the host does not."""

        self.marks: list[tuple[Any, Any]] = []
        """Marks around each wait, while there is `mark`; whoever measures takes them."""

        self._depth = 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block as waiting, unless a thread in the background waits."""
        if threading.current_thread() is not threading.main_thread():  # which trains
            yield
            return
        self._depth += 1
        if self._depth > 1:
            try:
                yield
            finally:
                self._depth -= 1
            return
        began, first = time.perf_counter(), None if self.mark is None else self.mark()
        try:
            yield
        finally:
            self._depth -= 1
            self.seconds += time.perf_counter() - began
            if self.mark is not None and first is not None:
                self.marks.append((first, self.mark()))


waits = WaitTimes()
"""Those of this process."""
