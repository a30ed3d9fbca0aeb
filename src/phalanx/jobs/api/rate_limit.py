"""How many requests one caller may make: a bucket that fills steadily and is emptied by requests."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

MAX_CALLERS = 10_000


class RateLimiter:
    """Counts requests by caller.

    Args:
        per_second: Requests a caller may make for ever.
        burst: Requests it may make at once after a pause.
        clock: Seconds that only grow.
    """

    def __init__(self, per_second: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._burst = burst
        self._clock = clock
        self._lock = threading.Lock()
        self._tokens: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, caller: str) -> float:
        """Count one request of `caller`; return 0, or the seconds until it may ask again."""
        with self._lock:
            now = self._clock()
            left, since = self._tokens.pop(caller, (float(self._burst), now))
            left = min(self._burst, left + (now - since) * self._per_second)
            wait = 0.0 if left >= 1 else (1 - left) / self._per_second
            self._tokens[caller] = (left if wait else left - 1, now)
            # Those who have not asked for longest have a full bucket again, or will soon.
            while len(self._tokens) > MAX_CALLERS:
                self._tokens.popitem(last=False)
            return wait
