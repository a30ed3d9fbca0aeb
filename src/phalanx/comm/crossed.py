"""`watch`: detect a deadlock of ranks: one waits at the store, another in a collective that the first has not called.

It sees groups of ranks that share memory on one host. Elsewhere (gloo, NCCL, several hosts) nobody can tell which call
another rank is in, and such ranks wait until their timeout.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

from phalanx.errors import ConfigError

PATIENCE_S = 1.0
"""Seconds that another rank waits in one call before it counts: this rank may just be about to make it."""

_cores: weakref.WeakSet[Any] = weakref.WeakSet()


def watch(group: Any) -> None:
    """Look at a group of ranks that share memory from now on, for as long as it lives.

    Args:
        group: Has `waited_for` and `disagree`, which say and end what `csrc/shm_group.h` says.
    """
    _cores.add(group)


class Crossing:
    """The wait of one rank in the store, and what other ranks wait in meanwhile.

    Args:
        me: What messages call this rank.
        name: What this rank waits at.
    """

    def __init__(self, me: str, name: str) -> None:
        self._me, self._name = me, name
        self._first: tuple[str, float] = ("", 0.0)
        # Collectives may be made by any thread; that the one that waits here is the one that would make it is known of
        # the main thread, where scripts train.
        self._is_main = threading.current_thread() is threading.main_thread()

    def look(self) -> None:
        """End the group of a rank that waits for this one, on all of its ranks.

        Raises:
            ConfigError: Names what each of the two waits in.
        """
        if not self._is_main:
            return
        for group in list(_cores):
            other = group.waited_for()
            if not other:
                continue
            now = time.monotonic()
            if self._first[0] != other:
                self._first = (other, now)
            elif now - self._first[1] >= PATIENCE_S:
                message = (
                    f"{self._me} waits in {self._name}, and {other}: each waits for the other to make its call. Call "
                    f"{self._name} on every rank, at the same place: look for an `if rank == ...` around it."
                )
                group.disagree(message)
                raise ConfigError(message)
            return
        self._first = ("", 0.0)
