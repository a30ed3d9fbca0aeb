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


def batches(worker: int, keys: int = KEYS) -> list[Batch]:
    """Return a worker's batches: ids int64 (512, 26) below `keys`, dense float32 (512, 13), clicks float32 (512, 1)."""
    draw = np.random.default_rng(worker)
    return [
        (
            draw.integers(0, keys, (BATCH, SLOTS)),
            draw.random((BATCH, DENSE), np.float32),
            draw.integers(0, 2, (BATCH, 1)).astype(np.float32),
        )
        for _ in range(BATCHES)
    ]


def time_steps(worker: int, step: Callable[[int], float]) -> None:
    """Train the warm-up steps, wait for the other workers, train the timed steps, and leave the span in a file.

    The warm-up sees every batch once, so that no row is new afterwards. `BENCH_STEPS`, `BENCH_WORKERS` and
    `BENCH_FOLDER` say how many steps and workers, and where the file goes.

    Args:
        worker: Rank of this worker.
        step: Trains on the batch of this number and returns its loss.
    """
    folder, steps = Path(os.environ["BENCH_FOLDER"]), int(os.environ["BENCH_STEPS"])
    for number in range(min(BATCHES, steps)):
        step(number)
    meet("ready", worker)
    started, used = time.time(), _cpu_s()
    losses = [step(number % BATCHES) for number in range(steps)]
    span = {"started": started, "ended": time.time(), "cpu_s": _cpu_s() - used, "examples": steps * BATCH}
    (folder / f"span-{worker}.json").write_text(json.dumps(span | {"loss": losses[-1]}))


def meet(name: str, worker: int, timeout_s: float = 300.0) -> None:
    """Wait until every worker of this run is here: through files, since the engines have no barrier in common."""
    folder, workers = Path(os.environ["BENCH_FOLDER"]), int(os.environ["BENCH_WORKERS"])
    (folder / f"{name}-{worker}").touch()
    give_up = time.monotonic() + timeout_s
    while len(list(folder.glob(f"{name}-*"))) < workers:
        if time.monotonic() > give_up:
            raise TimeoutError(f"{workers} workers were to be {name} in {folder}; after {timeout_s:.0f} s some are not")
        time.sleep(0.002)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
