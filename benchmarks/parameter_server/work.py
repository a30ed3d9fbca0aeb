"""The work that all engines do: wide & deep on 26 slots of one shared table, and the span in which it is timed.

NumPy alone, so that it runs in every peer's environment.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

SLOTS, DENSE, DIM, KEYS = 26, 13, 16, 1_000_000
BATCH = 512
WIDTHS = (SLOTS * DIM + DENSE, 400, 400, 400, 1)
LEARNING_RATE = 0.01
BATCHES = 64
"""Batches held in memory, of which training takes one after the other, again and again."""

Batch = tuple[np.ndarray, np.ndarray, np.ndarray]


def batches(worker: int) -> list[Batch]:
    """Return a worker's batches: ids int64 (512, 26) below 1 M, dense float32 (512, 13), clicks float32 (512, 1)."""
    draw = np.random.default_rng(worker)
    return [
        (
            draw.integers(0, KEYS, (BATCH, SLOTS)),
            draw.random((BATCH, DENSE), np.float32),
            draw.integers(0, 2, (BATCH, 1)).astype(np.float32),
        )
        for _ in range(BATCHES)
    ]


def time_steps(worker: int, step: Callable[[int], None]) -> None:
    """Train the warm-up steps, wait for the other workers, train the timed steps, and leave the span in a file.

    `BENCH_STEPS`, `BENCH_WORKERS` and `BENCH_FOLDER` say how many steps and workers, and where the file goes.

    Args:
        worker: Rank of this worker.
        step: Trains on the batch of the step with this number.
    """
    folder, steps = Path(os.environ["BENCH_FOLDER"]), int(os.environ["BENCH_STEPS"])
    warm_up = max(3, steps // 5)
    for number in range(warm_up):
        step(number % BATCHES)
    _meet(folder, worker, int(os.environ["BENCH_WORKERS"]))
    started, used = time.time(), _cpu_s()
    for number in range(warm_up, warm_up + steps):
        step(number % BATCHES)
    span = {"started": started, "ended": time.time(), "cpu_s": _cpu_s() - used, "examples": steps * BATCH}
    (folder / f"span-{worker}.json").write_text(json.dumps(span))


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _meet(folder: Path, worker: int, workers: int, timeout_s: float = 120.0) -> None:
    """Wait until every worker of this run is here: through files, since the engines have no barrier in common."""
    (folder / f"ready-{worker}").touch()
    give_up = time.monotonic() + timeout_s
    while len(list(folder.glob("ready-*"))) < workers:
        if time.monotonic() > give_up:
            raise TimeoutError(f"{workers} workers were to meet in {folder}; after {timeout_s:.0f} s some are missing")
        time.sleep(0.002)
