"""What the controller asks of the store, as one interface; each call is one transaction. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from phalanx.jobs.models import Attempt, Event, Failure, Job
from phalanx.jobs.states import JobState


class JobStateStore(Protocol):
    """The part of the store that changes jobs. A controller may die between any two calls; another one resumes.

    A transition that `states.may_follow` does not allow raises StateError and changes nothing:
    people stop jobs meanwhile.
    """

    def lease(self, name: str, holder: str, seconds: float) -> bool:
        """Take or prolong a lease; False while it is another holder's and has not run out."""

    def lease_holder(self, name: str) -> str | None:
        """Return who has a lease that has not run out."""

    def release(self, name: str, holder: str) -> None:
        """Give a lease up; nothing happens when it is not `holder`'s."""

    def last_change(self) -> Any:
        """Return a value that is another one after a job was made or changed its state. Cheap: asked twice a second."""

    def jobs(self, *, states: Collection[JobState] = (), ended_after: datetime | None = None) -> list[Job]:
        """Return jobs, newest first."""

    def attempts(self, job: str) -> list[Attempt]:
        """Return the attempts of a job, first to last."""

    def events(self, job: str) -> list[Event]:
        """Return what happened to a job, in order."""

    def begin_attempt(self, job: str) -> Attempt:
        """Begin the next attempt at a queued or restarting job, before it is submitted to the backend.

        Raises:
            StateError: If the job is in another state, or has an attempt that has not ended.
        """

    def submitted(self, job: str, number: int, handle: str) -> None:
        """Note the backend's name for an attempt."""

    def change(
        self,
        job: str,
        state: JobState,
        reason: str = "",
        *,
        failure: Failure | None = None,
        started: datetime | None = None,
    ) -> Job:
        """Bring a job into another state, with an event; its attempt that has not ended goes along.

        Restarting and terminal states end the attempt. `started` is when its nodes began, if nobody saw it running.
        """

    def append(self, job: str, kind: str, message: str, data: Mapping[str, Any] | None = None) -> None:
        """Append an event to a job's history."""

    def explain(self, reasons: Mapping[str, str]) -> None:
        """Set why jobs are in the state they are in, without an event."""

    def secret_values(self, workspace: str, names: Sequence[str]) -> dict[str, str]:
        """Return secrets in the clear, by name.

        Raises:
            NotFoundError: If one is no longer there.
        """
