"""`Outcome`: how an attempt of a job ended."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.launch.reports.root_cause import ProcessExit


@dataclass(kw_only=True)
class Outcome:
    """How an attempt ended: a success, a failure, or a stop from outside."""

    exits: list[ProcessExit]
    failed: bool = False
    stopped_by: int = 0
    """The signal that ended the launcher's job, or 0."""

    refusal: str = ""
    """Why an elastic job could not continue."""
