"""`GradientReduction`: simulate bucketed gradient all-reduce overlapped with the backward pass (pure)."""

from __future__ import annotations

import math
from collections import deque


class GradientReduction:
    """Buckets in the order in which they became ready, and how far the first of them is.

    Beside computation both go at 1 / (1 + contention) of their speed, so the longer takes its own time, and contention
    for each second of the shorter.
    """

    def __init__(self, contention: float) -> None:
        self.done: list[tuple[float, float]] = []
        """Start and end of every bucket that is through."""

        self._slower = 1 + contention
        self._waiting: deque[float] = deque()
        self._start = 0.0
        """When the first bucket that waits began to travel."""

    def add(self, time: float, seconds: float) -> None:
        """Let a bucket that takes so many seconds travel from a time on."""
        if not self._waiting:
            self._start = time
        self._waiting.append(seconds)

    def beside(self, start: float, seconds: float) -> float:
        """Compute for so many seconds, and return when that ends: later where buckets travel meanwhile."""
        shared = self._drain(start, seconds, self._slower)
        return start + seconds + (self._slower - 1) * shared

    def idle(self, start: float, end: float) -> None:
        """Compute nothing from one time to another."""
        self._drain(start, end - start, 1.0)

    def finish(self, start: float) -> float:
        """Compute nothing until all buckets are through, and return when that is."""
        return start + self._drain(start, math.inf, 1.0)

    def _drain(self, start: float, seconds: float, slower: float) -> float:
        """Let buckets travel for at most so many seconds of their own; return how many they took."""
        taken = 0.0
        while self._waiting and taken < seconds:
            step = min(self._waiting[0], seconds - taken)
            taken += step
            if step < self._waiting[0]:
                self._waiting[0] -= step
                break
            self._waiting.popleft()
            end = start + slower * taken
            self.done.append((self._start, end))
            self._start = end
        return taken
