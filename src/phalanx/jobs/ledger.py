"""What the keeper asks of the store, as one interface; each call is one transaction. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Protocol

from phalanx.jobs.records import Attempt, Failure, Job
from phalanx.jobs.states import State


class Ledger(Protocol):
    """The part of the store that moves jobs. A keeper may die between any two calls, and another goes on.

    A call that would take a job where `states.may_follow` says it cannot go raises StateError and changes nothing: people
    stop jobs meanwhile.
    """

    def lease(self, name: str, holder: str, seconds: float) -> bool:
        """Take or prolong a lease; False while it is another holder's and has not run out."""

    def lease_holder(self, name: str) -> str | None:
        """Return who has a lease that has not run out."""

    def release(self, name: str, holder: str) -> None:
        """Give a lease up; nothing happens when it is not `holder`'s."""

    def last_change(self) -> int:
        """Return a number that is another one after any job was made or changed its state. Cheap: asked twice a second."""

    def live_jobs(self) -> list[Job]:
        """Return the jobs in states that are not terminal, oldest first."""

    def attempts(self, job: str) -> list[Attempt]:
        """Return the attempts of a job, first to last."""

    def begin_attempt(self, job: str, number: int, reason: str) -> Attempt:
        """Make attempt `number` (one more than the last) of a queued or restarting job, both then preparing.

        Raises:
            StateError: If the job is in another state, or has that attempt.
        """

    def set_handle(self, job: str, number: int, handle: str) -> None:
        """Note the backend's name for an attempt that it has taken."""

    def blame(self, job: str, number: int, failure: Failure) -> None:
        """Note why a live attempt is being ended (it hangs, its time is over), with an event; its state stays."""

    def move(
        self,
        job: str,
        state: State,
        reason: str,
        *,
        failure: Failure | None = None,
        attempt_state: State | None = None,
    ) -> Job:
        """Take a job to `state`, with an event, and its last attempt to `attempt_state` (by default the same).

        A failure goes to the attempt, and to the job too when `state` is failed. Terminal states and `restarting` end the
        attempt; it is then `attempt_state` failed, stopped or succeeded.
        """

    def explain(self, reasons: Mapping[str, str]) -> None:
        """Set why jobs are in the state they are in, without an event."""

    def secret_values(self, workspace: str, names: tuple[str, ...]) -> dict[str, str]:
        """Return secrets in the clear, by name.

        Raises:
            NotFoundError: If one is no longer there.
        """

    def used_since(self, since: datetime) -> dict[tuple[str, str], float]:
        """Return the seconds that attempts ran since then, by (workspace, owner) of their jobs."""
