"""`WriteFreeze`: serialises writes in log order, and blocks them during a snapshot."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from phalanx.errors import BackendError, ConfigError

_log = logging.getLogger("phalanx.ps")


@dataclass(frozen=True, slots=True)
class _Freeze:
    token: str
    until: float
    steps: tuple[int, ...]
    """Changes below these steps, by worker, still pass, so that every server stops at the same ones."""


class WriteFreeze:
    """Lets changes through one at a time, and holds them back during a freeze.

    A freeze ends by itself at its deadline, so that a coordinator that died cannot stop training for good.

    Args:
        clock: Seconds of a clock that never goes back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._busy = False
        self._freeze: _Freeze | None = None

    @contextmanager
    def change(self, worker: int = -1, step: int = 0) -> Iterator[None]:
        """Be the only change meanwhile; waits while a freeze holds this worker's step back."""
        with self._changed:
            while self._busy or self._is_blocked(worker, step):
                self._changed.wait(self._seconds_left())
            self._busy = True
        with self._turn():
            yield

    @contextmanager
    def while_frozen(self, token: str) -> Iterator[None]:
        """Be inside the freeze that `token` began, while nothing changes.

        Raises:
            BackendError: If that freeze is over.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._busy)
            if not self._is_frozen() or self._freeze is None or self._freeze.token != token:
                raise BackendError(
                    f"The moment of snapshot {token} is over: training was let go at its deadline, or this server was "
                    "started again since. Save again; if it comes back, a server takes too long to answer."
                )
            self._busy = True
        with self._turn():
            yield

    def freeze(self, token: str, seconds: float, steps: Sequence[int] = ()) -> None:
        """Hold changes back for at most so many seconds, but those below `steps`; renews a freeze of the same token.

        Raises:
            ConfigError: If another snapshot holds them already.
        """
        with self._changed:
            if self._is_frozen() and self._freeze is not None and self._freeze.token != token:
                raise ConfigError(
                    f"Asked for a snapshot while snapshot {self._freeze.token} begins. Save from one worker at a time."
                )
            self._freeze = _Freeze(token, self._clock() + seconds, tuple(steps))
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._busy)

    def resume(self, token: str) -> None:
        """Let changes go on; does nothing if that freeze is over."""
        with self._changed:
            if self._freeze is not None and self._freeze.token == token:
                self._freeze = None
                self._changed.notify_all()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """End being busy, as `change` and `while_frozen` began it."""
        try:
            yield
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _is_blocked(self, worker: int, step: int) -> bool:
        if not self._is_frozen() or self._freeze is None:
            return False
        return not (0 <= worker < len(self._freeze.steps) and step < self._freeze.steps[worker])

    def _is_frozen(self) -> bool:
        if self._freeze is not None and self._clock() >= self._freeze.until:
            _log.warning("snapshot %s did not let go in time: training goes on", self._freeze.token)
            self._freeze = None
            self._changed.notify_all()
        return self._freeze is not None

    def _seconds_left(self) -> float | None:
        return None if self._freeze is None else max(0.0, self._freeze.until - self._clock())
