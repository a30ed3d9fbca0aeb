"""`RestartBudget`: how many lost ranks may be replaced (pure)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

WINDOW_S = 600.0
DEFAULT_IN_WINDOW = 3
"""Replacements within `WINDOW_S` unless --max_restarts says how many there may be in all."""


@dataclass
class RestartBudget:
    """Counts replacements: `total` in all, or, where that is None, `DEFAULT_IN_WINDOW` within `WINDOW_S`."""

    total: int | None
    max_restarts: int = 0
    """What --max_restarts allows in all, of whole restarts too."""

    _times: deque[float] = field(default_factory=deque)

    def remaining(self, now: float) -> int:
        """Return how many ranks may be replaced at `now`."""
        if self.total is not None:
            return self.total
        while self._times and now - self._times[0] >= WINDOW_S:
            self._times.popleft()
        return DEFAULT_IN_WINDOW - len(self._times)

    def spend(self, now: float) -> None:
        """Count one replacement."""
        if self.total is not None:
            self.total -= 1
        self._times.append(now)

    @property
    def limit(self) -> str:
        """The limit in words."""
        if self.total is not None:
            return f"all {self.max_restarts} of --max_restarts {self.max_restarts} are used"
        return f"{DEFAULT_IN_WINDOW} in {WINDOW_S / 60:g} minutes; --max_restarts changes it"
