"""`CallbackDispatcher`: calls the callbacks; errors and stop requests take effect on all ranks together."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from phalanx.checkpoint.graceful_stop import GracefulStop
from phalanx.checkpoint.ranks import Ranks
from phalanx.comm import process_group
from phalanx.comm.agreement import DEFAULT_TIMEOUT_S
from phalanx.errors import ConfigError, PhalanxError
from phalanx.train.callbacks.base import Callback, names_of

if TYPE_CHECKING:  # a run has edges
    from phalanx.train.callbacks.run import Run

logger = logging.getLogger("phalanx.train")

SIGNALLED = "asked to end (SIGTERM)"
"""The reason if no rank gave one."""


class CallbackDispatcher:
    """Calls the callbacks, and keeps failures and stop requests until the next boundary, where all ranks learn of them.

    Collective: every rank creates one with the same callbacks and passes the same boundaries.

    Args:
        callbacks: In the order in which they are called.
        terms: What else must be the same on all ranks, as a JSON value.
    """

    def __init__(self, callbacks: Sequence[Callback], terms: dict[str, Any]) -> None:
        self.callbacks, self.names = callbacks, names_of(callbacks)
        self.stop_reason: str | None = None
        """Why all ranks stop, once they have agreed to."""

        self._terms = {**terms, "callbacks": self.names}
        self._generation = process_group.generation()
        self._ranks = ranks = Ranks.meet("training", self._terms, timeout_s=DEFAULT_TIMEOUT_S)
        self._stop = GracefulStop(ranks.rank, ranks.world_size, ranks.store, f"{ranks.prefix}/stop")
        self._failure: tuple[str, Exception] | None = None
        self._reason: str | None = None
        self._passed = 0

    def call_all(self, method: str, run: Run) -> None:
        """Call a method of every callback; the first failure is kept."""
        for name, callback in zip(self.names, self.callbacks, strict=True):
            try:
                getattr(callback, method)(run)
            except Exception as error:  # noqa: BLE001 -- raised at the next boundary
                if self._failure is None:
                    self._failed(f"callback {name} failed in {method} at step {run.step}", error)

    def _failed(self, what: str, error: Exception) -> None:
        self._failure = what, error
        self._stop.ask()
        if self._ranks.world_size > 1:  # another rank may raise before this one, without the place in the callback
            logger.error("%s", what, exc_info=error)

    def request_stop(self, reason: str) -> None:
        """Ask all ranks to stop at a boundary; the first reason counts."""
        self._reason = self._reason or reason
        self._stop.ask()

    def listen(self) -> None:
        """Treat SIGTERM as a stop request, too."""
        self._stop.listen()

    def should_stop(self, step: int) -> bool:
        """Pass a boundary; return whether all ranks stop here, or did before.

        Raises:
            PhalanxError: If a callback failed, on any rank; on all.
        """
        self._passed += 1
        if self.stop_reason is None and self._stop.is_at(self._passed):
            self.stop_reason = self.decide("stop")
            if self._ranks.rank == 0:
                logger.info("training stops at step %d: %s", step, self.stop_reason)
        return self.stop_reason is not None

    def decide(self, topic: str) -> str:
        """Return the first stop reason of any rank; raise on all ranks what failed on any. Collective."""

        def first(reasons: list[str | None]) -> str:
            return next(filter(None, reasons), SIGNALLED)

        if self._generation != process_group.generation():  # ranks have left or joined
            self._generation = process_group.generation()
            self._ranks = Ranks.meet("training", self._terms, timeout_s=DEFAULT_TIMEOUT_S)
        reason: str = self._ranks.decide(topic, self._reason_or_failure, first, timeout_s=DEFAULT_TIMEOUT_S)
        return reason

    def _reason_or_failure(self) -> str | None:
        """Return this rank's stop reason, or raise its failure."""
        if self._failure is None:
            return self._reason
        what, error = self._failure
        if isinstance(error, PhalanxError):
            error.add_note(what)
            raise error
        raise ConfigError(f"{what}: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Restore the signal handlers. Not collective."""
        self._stop.close()
