"""`Native`: waits for operations of the native shared-memory group, and names the rank that is late."""

from __future__ import annotations

import logging
import time
from typing import Any

from phalanx.comm.elastic.membership import current as current_membership

logger = logging.getLogger("phalanx.comm")

SAY_AFTER_S = 10.0
"""Seconds a caller waits until a line says for whom; the next lines come after twice as long each."""


SIGNALS_S = 1.0
"""How often a caller that waits comes back to Python, which acts on signals such as Ctrl-C only then."""


MEMBERS_S = 0.1
"""The same in an elastic job, where the launcher may say that another rank is lost."""


class Native:
    """Carries operations out over a `phalanx._core.SharedGroup`, and says who keeps a caller waiting."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def wait(self, operation: Any, timeout_s: float = 0.0, /) -> None:
        """Wait for the end; raises what ended it, or that a member of an elastic job is lost."""
        if timeout_s:
            self._core.wait(operation, timeout_s)
            return
        start = time.monotonic()
        pause = due = SAY_AFTER_S
        membership = current_membership()
        longest_s = SIGNALS_S if membership is None else MEMBERS_S
        while not self._core.ends_within(operation, min(pause, longest_s)):
            waited = time.monotonic() - start
            if membership is not None:
                membership.check()
                membership.suspect(self._core.missing_ranks(operation), waited)
            if waited < due:
                continue
            if missing := self._core.missing_from(operation):
                logger.warning("waiting since %.0f s: %s", waited, missing)
            pause *= 2
            due += pause

    def tend(self, operation: Any, /) -> None:
        """Wait for the end in the background; does not raise."""
        self._core.progress(operation)
