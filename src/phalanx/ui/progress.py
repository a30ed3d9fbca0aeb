"""`JobProgress`: how far a training is, how long it still takes, and a sparkline of its loss (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_LONGEST_S = 1e10
"""Longer than any training: times that no clock gave."""

_SPARK_WIDTH, _SPARK_HEIGHT = 90, 20

_MOST_DRAWN = 1e300
"""Greater numbers, infinite ones and NaN have no place in a picture."""


@dataclass(frozen=True)
class JobProgress:
    """How far a job is by its last reports.

    Attributes:
        step: Optimizer steps so far.
        total: Steps of the whole training; None if the script did not report `total_steps`.
        epoch: Epoch in progress, counted from 1; None if it is not reported.
        epochs: Epochs of the whole training; None if it is not reported.
        remaining_s: Seconds until the last step at the pace of the last reports; None where it cannot be told.
        loss: The last one reported, which may be NaN or infinite; None if none was.
        spark: Points of an SVG polyline of the last losses, 90 x 20; empty for fewer than two.
    """

    step: int
    total: int | None = None
    epoch: int | None = None
    epochs: int | None = None
    remaining_s: float | None = None
    loss: float | None = None
    spark: str = ""

    @property
    def fraction(self) -> float | None:
        """Part of all steps that are done, 0 to 1; None without a total."""
        return None if self.total is None else min(1.0, self.step / self.total)


def compute_progress(events: Sequence[Mapping[str, Any]]) -> JobProgress | None:
    """Return the progress that a rank's last events tell, oldest first; None if there are none.

    Any script writes these events: values of other types than expected are left out.
    """
    if not events:
        return None
    last = events[-1]
    step = _count(last.get("step"))
    if step is None:
        return None
    total, epoch = _count(last.get("total_steps")), _count(last.get("epoch"))
    done = step + 1
    losses = [float(event["loss"]) for event in events if _is_number(event.get("loss"))]
    total = total if total else None  # a training of no steps has no fraction
    return JobProgress(
        step=done,
        total=total,
        epoch=None if epoch is None else epoch + 1,
        epochs=_count(last.get("epochs")),
        remaining_s=None if total is None else _remaining_s(events, done, total),
        loss=losses[-1] if losses else None,
        spark=_sparkline([loss for loss in losses if abs(loss) < _MOST_DRAWN]),
    )


def _remaining_s(events: Sequence[Mapping[str, Any]], done: int, total: int) -> float | None:
    first_step, first_time = _count(events[0].get("step")), _number(events[0].get("time"))
    last_time = _number(events[-1].get("time"))
    if first_step is None or first_time is None or last_time is None:
        return None
    steps, seconds = done - 1 - first_step, last_time - first_time
    if steps <= 0 or seconds <= 0:
        return None
    remaining = max(0, total - done) * seconds / steps
    return remaining if remaining < _LONGEST_S else None


def _sparkline(values: Sequence[float]) -> str:
    if len(values) < 2:
        return ""
    least, most = min(values), max(values)
    height = (most - least) or 1.0
    points = (
        (_SPARK_WIDTH * index / (len(values) - 1), 1 + (_SPARK_HEIGHT - 2) * (most - value) / height)
        for index, value in enumerate(values)
    )
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _count(value: Any) -> int | None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53
    return value if is_count else None


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63)


def _number(value: Any) -> float | None:
    return float(value) if _is_number(value) and abs(value) < _MOST_DRAWN else None
