"""`WriteFreeze`: who may change a server now: pushes beside each other, other changes alone; and freezes of a snapshot.

The native gate (`csrc/server_gate.h`) keeps the rules; pushes pass it natively. A freeze ends by itself at its
deadline, so that a coordinator that died cannot stop training for good.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from phalanx._core import WriteGate
from phalanx.ps.server.clocks import WAIT_REPORT_S, WaitReport, ignore_wait

_log = logging.getLogger("phalanx.ps")


class WriteFreeze(WriteGate):
    """The gate of a server. All methods may be called by any thread.

    Args:
        clock: Seconds of a clock that never goes back.
        report_s: Seconds between two reports to a change that a freeze holds back of whom it waits for.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, report_s: float = WAIT_REPORT_S) -> None:
        super().__init__(clock, _warn_expired, report_s)

    @contextmanager
    def push(self, worker: int, step: int) -> Iterator[None]:
        """Be a push among others; waits while a freeze holds this worker's step back."""
        self.enter(worker, step)
        try:
            yield
        finally:
            self.leave()

    @contextmanager
    def change(self, worker: int = -1, step: int = 0, report_wait: WaitReport = ignore_wait) -> Iterator[None]:
        """Be the only change meanwhile; waits while a freeze holds this worker's step back."""
        self.enter_alone(worker, step, report_wait)
        try:
            yield
        finally:
            self.leave_alone()

    @contextmanager
    def while_frozen(self, token: str) -> Iterator[None]:
        """Be inside the freeze that `token` began, while nothing changes.

        Raises:
            BackendError: If that freeze is over.
        """
        self.enter_frozen(token)
        try:
            yield
        finally:
            self.leave_alone()


def _warn_expired(token: str) -> None:
    _log.warning("snapshot %s did not let go in time: training continues", token)
