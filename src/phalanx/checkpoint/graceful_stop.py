"""`GracefulStop`: after SIGTERM or SIGHUP on any rank, all ranks stop at the same step.

The signal may reach only some ranks, at different steps, while others wait in a collective. So no rank stops at once:
each announces through the store which step boundary it reaches next, and waits there until all have announced theirs;
they stop at the latest of these. No deadlock: a thread announces the boundary, whatever the training thread does.
Until a signal arrives, a step costs one check of a flag in memory.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import signal
import threading
import time
from types import FrameType
from typing import Any
from weakref import WeakSet

import phalanx.comm.context as context_of
from phalanx.checkpoint.ranks import is_elastic
from phalanx.comm.store import JobStore
from phalanx.errors import PeerLostError

logger = logging.getLogger("phalanx.checkpoint")

POLL_S = 0.1
"""How often the thread checks whether any rank was asked to end."""

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)

EDGES_TIMEOUT_S = 60.0
"""Longest wait at a step boundary for the announcements of the others."""


_asked: WeakSet[GracefulStop] = WeakSet()
"""Those of an elastic job that were asked to stop and are not closed."""


class GracefulStop:
    """Agrees on the step boundary at which all ranks stop, once any was asked to."""

    def __init__(self, rank: int, world_size: int, store: JobStore | None, prefix: str) -> None:
        self._rank, self._world_size, self._store, self._prefix = rank, world_size, store, prefix
        self._lock = threading.Lock()
        self._next_edge = 0
        self._requested = threading.Event()
        self._has_announced = threading.Event()
        """Set when this rank has announced its boundary, which it will not pass before it knows those of the others."""

        self._is_decided = threading.Event()
        self._edge = 0
        self._closed = threading.Event()
        self._before: dict[int, Any] = {}
        self._thread: threading.Thread | None = None
        self._recovery = context_of.current().recovery if is_elastic() else None
        """Where ranks agree that an update is complete, and on stopping with it: `ElasticRecovery.is_stopping`."""

        self._update_recovery()
        if store is not None and self._recovery is None:
            self._thread = threading.Thread(target=self._watch, name="phalanx stop edge", daemon=True)
            self._thread.start()

    def listen(self) -> None:
        """Handle SIGTERM and SIGHUP as a request to stop at a step boundary. Only in the main thread. Idempotent.

        An ignored SIGHUP stays ignored: under nohup a closed terminal must not end the training.
        """
        if self._before:
            return
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._on_signal)
            atexit.register(self.close)
        else:
            logger.warning("SIGTERM ends this process at once: only the main thread of Python can change that")

    def ask(self) -> None:
        """Ask all ranks to stop at a step boundary."""
        self._requested.set()
        if self._recovery is not None:
            _asked.add(self)
            self._recovery.is_stop_requested = True

    def is_at(self, edge: int) -> bool:
        """Return whether all ranks stop at this step boundary; every rank calls it at every boundary.

        Ranks that all ask before the same boundary stop at it; in an elastic job one update later.

        Args:
            edge: Steps done; any increasing numbers, the same on all ranks.

        Raises:
            PeerLostError: If a rank has not announced its boundary in time.
        """
        if self._recovery is not None:
            return bool(self._recovery.is_stopping)
        if self._store is None:
            return self._requested.is_set()
        with self._lock:
            has_asked = self._requested.is_set()  # then it stops here, unless another rank is further ahead
            self._next_edge = edge if has_asked else edge + 1
            waits = has_asked or self._has_announced.is_set()
        if not waits:
            return False
        if not self._is_decided.wait(EDGES_TIMEOUT_S):
            raise PeerLostError(
                f"rank {self._rank} was to stop at step {edge} and waited {EDGES_TIMEOUT_S:.0f} s for the steps of the "
                "other ranks. One of them has ended or hangs, or has no Checkpointer: its log says where."
            )
        return edge >= self._edge

    def close(self) -> None:
        """End the thread and restore the signal handlers, unless they were replaced since."""
        atexit.unregister(self.close)
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        for number, before in self._before.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, before)
        self._before = {}
        _asked.discard(self)
        self._update_recovery()

    def _update_recovery(self) -> None:
        """Let no request outlive what was to stop: the recovery is of the process. Others are agreed on again."""
        if self._recovery is not None:
            self._recovery.is_stop_requested, self._recovery.is_stopping = bool(_asked), False

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.ask()

    def _watch(self) -> None:
        assert self._store is not None
        key = f"{self._prefix}/wanted"
        with contextlib.suppress(PeerLostError):  # the store is gone, and with it the job
            while not self._closed.wait(POLL_S):
                if self._requested.is_set():
                    self._store.set(key, "")
                if self._requested.is_set() or self._store.has([key]):
                    self._agree()
                    return

    def _agree(self) -> None:
        assert self._store is not None
        with self._lock:
            mine = self._next_edge
            self._has_announced.set()
        self._store.set(f"{self._prefix}/edge/{self._rank}", str(mine))
        keys = [f"{self._prefix}/edge/{rank}" for rank in range(self._world_size)]
        deadline = time.monotonic() + EDGES_TIMEOUT_S
        while not self._store.wait(keys, 1.0):
            # A closed rank announces nothing any more, and this one reaches no further boundary.
            if self._closed.is_set() or time.monotonic() > deadline:
                return
        self._edge = max(int(self._store.get(key)) for key in keys)
        self._is_decided.set()
