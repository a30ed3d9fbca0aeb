"""All ranks leave at the same step when any of them is asked to end (SIGTERM, or the SIGHUP of a closed terminal).

The signal may reach some ranks only, at different steps, while others wait in a collective. So no rank stops at once:
each says, through the store, which step edge it comes to next, and waits at that edge until all have said theirs; they
stop at the latest of these. Nobody waits for a rank that waits for them: the edges are told by a thread, whatever the
training thread does. Until a signal comes, a step costs one look at a flag in memory.
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

from phalanx.comm.store import JobStore
from phalanx.errors import PeerLostError

logger = logging.getLogger("phalanx.checkpoint")

POLL_S = 0.1
"""How often the thread looks for a rank that was asked to end."""

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)

EDGES_TIMEOUT_S = 60.0
"""Longest to wait at an edge for the edges of the others."""


class StopEdge:
    """The step edge at which all ranks stop, once any was asked to."""

    def __init__(self, rank: int, world_size: int, store: JobStore | None, prefix: str) -> None:
        self._rank, self._world_size, self._store, self._prefix = rank, world_size, store, prefix
        self._lock = threading.Lock()
        self._next_edge = 0
        self._asked = threading.Event()
        self._said = threading.Event()
        """Set when this rank has told its edge, which it will not pass before it knows those of the others."""

        self._known = threading.Event()
        self._edge = 0
        self._closed = threading.Event()
        self._before: dict[int, Any] = {}
        self._thread: threading.Thread | None = None
        if store is not None:
            self._thread = threading.Thread(target=self._watch, name="phalanx stop edge", daemon=True)
            self._thread.start()

    def listen(self) -> None:
        """Take SIGTERM and SIGHUP as a request to stop at a step edge. Only Python's main thread can. Once is enough.

        A SIGHUP that is ignored stays ignored: under nohup a closed terminal must not end the training.
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
        """Ask all ranks to stop at a step edge."""
        self._asked.set()

    def is_at(self, edge: int) -> bool:
        """Return whether all ranks stop at this step edge; called by each at every edge.

        Ranks that all ask before the same edge stop at it.

        Args:
            edge: Steps done; any numbers that rise, the same on all ranks.

        Raises:
            PeerLostError: If a rank has not said its edge in time.
        """
        if self._store is None:
            return self._asked.is_set()
        with self._lock:
            has_asked = self._asked.is_set()  # then it stops here, if no other rank has gone further
            self._next_edge = edge if has_asked else edge + 1
            waits = has_asked or self._said.is_set()
        if not waits:
            return False
        if not self._known.wait(EDGES_TIMEOUT_S):
            raise PeerLostError(
                f"rank {self._rank} was to stop at step {edge} and waited {EDGES_TIMEOUT_S:.0f} s for the steps of the "
                "other ranks. One of them has ended or hangs, or has no Checkpointer: its log says where."
            )
        return edge >= self._edge

    def close(self) -> None:
        """End the thread and give the signals back, unless somebody else has them by now."""
        atexit.unregister(self.close)
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        for number, before in self._before.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, before)
        self._before = {}

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._asked.set()

    def _watch(self) -> None:
        assert self._store is not None
        wanted = f"{self._prefix}/wanted"
        with contextlib.suppress(PeerLostError):  # the store has ended, and with it the job
            while not self._closed.wait(POLL_S):
                if self._asked.is_set():
                    self._store.set(wanted, "")
                if self._asked.is_set() or self._store.has([wanted]):
                    self._agree()
                    return

    def _agree(self) -> None:
        assert self._store is not None
        with self._lock:
            mine = self._next_edge
            self._said.set()
        self._store.set(f"{self._prefix}/edge/{self._rank}", str(mine))
        keys = [f"{self._prefix}/edge/{rank}" for rank in range(self._world_size)]
        deadline = time.monotonic() + EDGES_TIMEOUT_S
        while not self._store.wait(keys, 1.0):
            # A rank that has closed tells no edge any more, and neither does this one come to another.
            if self._closed.is_set() or time.monotonic() > deadline:
                return
        self._edge = max(int(self._store.get(key)) for key in keys)
        self._known.set()
