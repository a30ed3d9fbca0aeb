"""`History`: what changed the members of a job, what it cost, and the goodput that was left (pure)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from phalanx.cluster.view import View
from phalanx.units import format_length

SHOWN_LOSSES = 6
"""How many causes of lost time the last line names."""


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
    """Why the job could not go on after it; empty where it did."""

    @property
    def stall_s(self) -> float:
        """How long the members that went on stood still."""
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
        self._started = started
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

    def goodput(self, now: float) -> str:
        """Return in one line how much of the time went into steps, and where the rest was lost; "" before any step."""
        if self._first_step is None:
            return ""
        total_s = max(now - self._started, 1e-9)
        start_s = self._first_step - self._started
        stalls = [(event.stall_s, _cause(event)) for event in self.events if event.stall_s > 0]
        lost = [f"{start_s:.1f} s start"]
        lost += [f"{s:.1f} s {cause}" for s, cause in sorted(stalls, reverse=True)[:SHOWN_LOSSES]]
        if rest := sorted(stalls, reverse=True)[SHOWN_LOSSES:]:
            lost.append(f"{sum(s for s, _ in rest):.1f} s in {len(rest)} more")
        good_s = max(0.0, total_s - start_s - sum(s for s, _ in stalls))
        good, total = (format_length(seconds, digits=1) for seconds in (good_s, total_s))
        line = f"goodput {100 * good_s / total_s:.1f} %: {good} of steps in {total}"
        redone = sum(event.redone for event in self.events)
        return f"{line}; lost: {', '.join(lost)}" + (f"; {redone} samples computed again" if redone else "")


def _cause(event: EpochEvent) -> str:
    """What an event was about, shorter than the reason of its view."""
    names = (
        [f"{i} lost" for i in event.lost] + [f"{i} joined" for i in event.joined] + [f"{i} left" for i in event.left]
    )
    return " and ".join(names) or "a change"
