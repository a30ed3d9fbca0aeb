"""`LoadTurn`: one client at a time fills tables from a snapshot; it and those that wait are told how far that is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from phalanx.errors import ClosedError
from phalanx.ps.server.state import ServerState
from phalanx.ps.wire.message import RpcRequest
from phalanx.ps.wire.progress import WORK_REPORT_S, WorkProgress, WorkReporter


class LoadTurn:
    """The turn to add or replace tables of a server.

    Args:
        state: Of that server.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._lock = threading.RLock()

    @contextmanager
    def take(self, request: RpcRequest) -> Iterator[None]:
        """Be the only one that changes which tables there are; pushes continue meanwhile.

        Raises:
            ClosedError: If the client goes while it waits for its turn.
        """
        waiting = WorkReporter(request.report_work, WORK_REPORT_S)
        while not self._lock.acquire(timeout=WORK_REPORT_S):
            waiting.report(self._state.progress)
        try:
            self._state.progress = WorkProgress("loads", _reporter_to(request).report_if_due)
            yield
        finally:
            self._state.progress = WorkProgress("loads")
            self._lock.release()


def _reporter_to(request: RpcRequest) -> WorkReporter:
    def tell(does: str, has_moved: bool) -> None:
        try:
            request.report_work(does, has_moved)
        except ClosedError:
            return  # the load continues: a client that connects again, and all others, need it

    return WorkReporter(tell, WORK_REPORT_S)
