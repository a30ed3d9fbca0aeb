"""What rounds of a calibration come to, and how long a clock looks at one run."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from phalanx.cluster.calibration.figures import FULL_INNER
from phalanx.diagnose.calibrate.operators import (
    LONG_S,
    SAMPLES,
    Benchmark,
    BenchmarkTimer,
    matmul,
    median_grid,
    narrow_matmul,
    points,
)


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


def test_gradients_of_weights_from_few_rows_are_measured_apart() -> None:
    clock = BenchmarkTimer(lambda: None, quick=True)
    shapes: list[tuple[int, ...]] = []

    class ShapeRecorder(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.mm:
                shapes.append((*args[0].shape, *args[1].shape))
            return func(*args, **(kwargs or {}))

    with ShapeRecorder():
        measured = narrow_matmul(clock, "fp32", quick=True)
    sides = measured.axes[0]
    assert measured.axes == (sides, sides)
    # Each product has both sides as they are in the axes, and an inner dimension that the table is read for.
    inner = {k for _, k, _, _ in shapes}
    assert set(shapes) == {(m, k, k, n) for m in sides for n in sides for k in inner}
    assert all(1 < k < FULL_INNER for k in inner)
    assert len(measured.seconds) == len(sides) ** 2


def test_gradients_of_the_widest_weights_are_among_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    # The rows of such a product are the features of the output: those of (2048, 16) by (16, 1024) and of (1024, 16) by
    # (16, 2048) take the same, which lines from 512 rows on would not say.
    written: set[int] = set()

    def seconds(run: Benchmark) -> float:
        output = run()
        assert isinstance(output, torch.Tensor)
        written.add(output.data_ptr())
        return 1.0

    clock = BenchmarkTimer(lambda: None, quick=False)
    monkeypatch.setattr(clock, "seconds", seconds)
    rows, features, inner = matmul(clock, "fp32", quick=False).axes
    assert rows[-1] == features[-1] == inner[-1]
    assert len(written) == 1, "memory that was used before, as a step does not touch new pages"


def test_ranks_that_share_cores_count_the_processors_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "process_time", iter((1.0, 1.5)).__next__)
    assert BenchmarkTimer(lambda: None, quick=True, ranks_a_core=2.0).sample(lambda: None) == pytest.approx(1.0)
