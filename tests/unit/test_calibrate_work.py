"""What rounds of a calibration come to, and how long a clock looks at one run."""

from __future__ import annotations

import time

import pytest

from phalanx.diagnose.calibrate.operators import LONG_S, SAMPLES, BenchmarkTimer, median_grid, points


def test_a_disturbed_round_does_not_count() -> None:
    rounds = [points(((1, 8),), (1,), seconds) for seconds in ((1.0, 4.0), (9.0, 5.0), (2.0, 90.0))]
    found = median_grid(rounds)
    assert (found.axes, found.powers) == (((1.0, 8.0),), (1,))
    assert found.seconds == (2.0, 5.0)


def test_rounds_are_corrected_once_they_are_put_together() -> None:
    rounds = [points(((1, 8),), (1,), seconds) for seconds in ((3.0, 1.0), (3.0, 4.0), (3.0, 5.0))]
    assert median_grid(rounds).seconds == (3.0, 4.0), "one round alone would say that the smaller takes 1"


@pytest.mark.parametrize(("takes", "runs"), [(2 * LONG_S, 1), (LONG_S / 10, 2 + SAMPLES - 1)])
def test_long_runs_are_not_repeated(takes: float, runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now, started, aligned = 0.0, 0, 0

    def run() -> None:
        nonlocal now, started
        started += 1
        now += takes

    def align() -> None:
        nonlocal aligned
        aligned += 1

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    assert BenchmarkTimer(align, quick=False).seconds(run) == pytest.approx(takes)
    assert (started, aligned) == (runs, 1)


def test_ranks_that_share_cores_count_the_processors_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "process_time", iter((1.0, 1.5)).__next__)
    assert BenchmarkTimer(lambda: None, quick=True, ranks_a_core=2.0).sample(lambda: None) == pytest.approx(1.0)
