"""`Native`: waits for operations of the native shared-memory group, and names the rank that is late."""

from __future__ import annotations

import logging
import time
from typing import Any

logger = logging.getLogger("phalanx.comm")

SAY_AFTER_S = 10.0
"""Seconds a caller waits until a line says for whom; the next lines come after twice as long each."""


SIGNALS_S = 1.0
"""How often a caller that waits comes back to Python, which acts on signals such as Ctrl-C only then."""


class Native:
    """Carries operations out over a `phalanx._core.SharedGroup`, and says who keeps a caller waiting."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def wait(self, operation: Any, timeout_s: float = 0.0, /) -> None:
        """Wait for the end; raises what ended it."""
        if timeout_s:
            self._core.wait(operation, timeout_s)
            return
        start = time.monotonic()
        pause = due = SAY_AFTER_S
        while not self._core.ends_within(operation, min(pause, SIGNALS_S)):
            if (waited := time.monotonic() - start) < due:
                continue
            if missing := self._core.missing_from(operation):
                logger.warning("waiting since %.0f s: %s", waited, missing)
            pause *= 2
            due += pause

    def tend(self, operation: Any, /) -> None:
        """Wait for the end in the background; does not raise."""
        self._core.progress(operation)
