"""Progress of a job from its last reports, which any script may write."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.ui.progress import compute_progress


def _events(steps: int, **more: Any) -> list[dict[str, Any]]:
    return [{"time": 10.0 + step, "step": step, "loss": 4.0 - step, **more} for step in range(steps)]


def test_remaining_time_follows_the_pace_of_the_last_steps() -> None:
    progress = compute_progress(_events(4, total_steps=10, epoch=1, epochs=5))
    assert progress is not None
    assert (progress.step, progress.total, progress.fraction) == (4, 10, 0.4)
    assert (progress.epoch, progress.epochs, progress.remaining_s) == (2, 5, 6.0)
    assert progress.loss == 1.0
    assert progress.spark == "0.0,1.0 30.0,7.0 60.0,13.0 90.0,19.0"


def test_a_script_that_tells_no_total_has_a_step_alone() -> None:
    progress = compute_progress(_events(3))
    assert progress is not None
    assert (progress.step, progress.fraction, progress.remaining_s) == (3, None, None)


def test_a_loss_that_is_no_number_is_left_out() -> None:
    progress = compute_progress([*_events(2), {"step": 2, "loss": "low"}])
    assert progress is not None
    assert (progress.step, progress.loss) == (3, 3.0)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_diverged_is_shown_and_not_drawn(loss: float) -> None:
    progress = compute_progress([*_events(3), {"step": 3, "loss": loss}])
    assert progress is not None
    assert str(progress.loss) == str(loss)
    assert progress.spark == compute_progress(_events(3)).spark  # type: ignore[union-attr]


@pytest.mark.parametrize("events", [[], [{"time": 1.0}], [{"step": "7"}], [{"step": -1}], [{"step": True}]])
def test_events_without_a_step_are_no_progress(events: list[dict[str, Any]]) -> None:
    assert compute_progress(events) is None


def test_more_steps_than_were_planned_are_all_of_them() -> None:
    progress = compute_progress(_events(5, total_steps=3))
    assert progress is not None
    assert (progress.fraction, progress.remaining_s) == (1.0, 0.0)


def test_times_that_no_clock_gave_tell_no_end() -> None:
    events = [{"step": 0, "time": 0}, {"step": 1, "time": 9e299, "total_steps": 2**53 - 1}]
    progress = compute_progress(events)
    assert progress is not None
    assert progress.remaining_s is None


_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.lists(st.integers(), max_size=2)
)
_NAMES = st.sampled_from(["time", "step", "loss", "epoch", "epochs", "total_steps"])


@given(st.lists(st.dictionaries(_NAMES, _VALUES), max_size=5))
def test_whatever_a_script_writes_a_page_can_show(events: list[dict[str, Any]]) -> None:
    progress = compute_progress(events)
    if progress is not None:
        assert progress.fraction is None or 0 <= progress.fraction <= 1
        assert progress.remaining_s is None or progress.remaining_s >= 0
