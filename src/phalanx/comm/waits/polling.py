"""`Pause`: the pause between two looks at something that others do, short at first and longer from look to look."""

from __future__ import annotations

import time


class Pause:
    """Doubles from its first length to its longest.

    Args:
        first_s: Seconds of the first pause.
        longest_s: The most that one takes.
    """

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._next_s, self._longest_s = first_s, longest_s

    def wait(self, limit_s: float = float("inf")) -> None:
        """Sleep for the next pause, at most `limit_s`."""
        time.sleep(max(0.0, min(self._next_s, limit_s)))
        self._next_s = min(2 * self._next_s, self._longest_s)
