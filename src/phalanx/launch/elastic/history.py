"""`History`: what changed the members of a job, and what it cost (pure)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from phalanx.cluster.view import View


@dataclass(kw_only=True)
class EpochEvent:
    """One change of the members, from the view that was told until every member computed in it."""

    view: View
    time: float
    """When it was told, in seconds since the epoch."""

    lost: tuple[str, ...]
    joined: tuple[str, ...]
    left: tuple[str, ...]
    step: int | None = None
    redone: int = 0
    """Samples that were computed again."""

    seconds: dict[str, float] = field(default_factory=dict)
    """How long each member stood still."""

    ended: str = ""
    """Why the job could not continue after it; empty where it did."""

    @property
    def stall_s(self) -> float:
        """How long the members that continued stood still."""
        return max((s for member_id, s in self.seconds.items() if member_id not in self.joined), default=0.0)

    def to_json(self) -> dict[str, Any]:
        """Return the event as it is written."""
        return {
            "time": round(self.time, 3),
            "kind": "epoch",
            "epoch": self.view.epoch,
            "step": self.step,
            "ranks": len(self.view.members),
            "planned": self.view.planned,
            "reason": self.view.reason,
            "lost": self.lost,
            "joined": self.joined,
            "left": self.left,
            "seconds": {member_id: round(s, 3) for member_id, s in self.seconds.items()},
            "redone": self.redone,
            **({"ended": self.ended} if self.ended else {}),
        }


class History:
    """The changes of one attempt, in order."""

    def __init__(self, started: float) -> None:
        """Begin.

        Args:
            started: When the attempt began, by the clock of all times given here.
        """
        self.started = started
        self._first_step: float | None = None
        self._view: View | None = None
        self._open: list[EpochEvent] = []
        self.events: list[EpochEvent] = []

    def add_view(self, view: View, now: float) -> list[EpochEvent]:
        """Take notice of a view that ranks were told; returns the events that it ends unfinished."""
        before, self._view = self._view, view
        if before is None:
            return []
        gone = tuple(i for i in before.ids if i not in view.ids)
        event = EpochEvent(
            view=view,
            time=now,
            lost=() if view.planned else gone,
            joined=tuple(i for i in view.ids if i not in before.ids),
            left=gone if view.planned else (),
        )
        overtaken, self._open = self._open, [event]
        self.events.append(event)
        return overtaken

    def add_report(self, member_id: str, details: dict[str, Any], now: float) -> None:
        """Take notice that a member took up a view; view 0 when training begins."""
        if self._first_step is None:
            self._first_step = now
        for event in self._open:
            if event.view.epoch == details["epoch"]:
                event.seconds[member_id] = float(details.get("seconds", 0.0))
                event.redone += int(details.get("redone", 0))
                event.step = int(details["step"]) if details.get("step") is not None else event.step

    def settle(self) -> list[EpochEvent]:
        """Return the events that are complete now."""
        done, self._open = self._open, []
        return done

    @property
    def start_s(self) -> float | None:
        """Seconds until training began; None before."""
        return None if self._first_step is None else self._first_step - self.started

    @property
    def stalls(self) -> list[tuple[float, str]]:
        """For how long the members stood still, change by change, and what it was about."""
        return [(event.stall_s, _cause(event)) for event in self.events if event.stall_s > 0]

    @property
    def redone(self) -> int:
        """Samples that were computed again."""
        return sum(event.redone for event in self.events)


def _cause(event: EpochEvent) -> str:
    """What an event was about, shorter than the reason of its view."""
    names = (
        [f"{i} lost" for i in event.lost] + [f"{i} joined" for i in event.joined] + [f"{i} left" for i in event.left]
    )
    return " and ".join(names) or "a change"
