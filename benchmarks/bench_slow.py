"""What the slow report costs: a step of two ranks with and without it, and each of its parts by itself.

    python -m benchmarks.bench_slow [--quick] [--json] [--cases "shm,gloo,elastic,parts"]

Whole runs are paired, one with `--slow-share 0` beside each with the default; the figure is the ratio of their median
steps. On a machine that does other things this says whether a cost can be seen. `parts` adds up what the report does in
a rank, measured alone: a batch of the loader, a collection, a look of the reporter; per step of 2 ms.
"""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.report import Row, arguments, measure_pairs, show

ROOT = Path(__file__).parent.parent
RANK_SCRIPT = ROOT / "benchmarks" / "slow_rank.py"
STEP_S = 2e-3
CASES = ("shm", "gloo", "elastic", "parts")
RANKS = {"elastic": ("-n", "1:2", "--replicas", "2")}
"""What a case starts instead of two ranks that stay."""


def step_ms(case: str, steps: int, share: str) -> float:
    """Return the median step of a run in ms."""
    with tempfile.TemporaryDirectory() as log_dir:
        launcher = [sys.executable, "-m", "phalanx.launch", *RANKS.get(case, ("-n", "2"))]
        command = [*launcher, "--log-dir", log_dir, "--slow-share", share]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, str(RANK_SCRIPT), case, str(steps)],
            env=environment, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the run ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    line = next(line for line in done.stdout.splitlines() if line.startswith("STEP "))
    return 1e3 * float(line.removeprefix("STEP "))


def compare(case: str, *, steps: int, pairs: int) -> Row:
    """Measure steps of one case with the report and without."""
    return measure_pairs(
        f"step, {case}, the report on",
        lambda: step_ms(case, steps, "0.05"),
        lambda: step_ms(case, steps, "0"),
        pairs=pairs, unit="ms", better="lower", peer_name="off",
    )  # fmt: skip


def parts(rounds: int) -> Row:
    """Measure what is added to a step of 2 ms: one batch, one collection in ten steps, and the looks of a second."""
    from phalanx.comm.batch.input_time import InputTime
    from phalanx.launch.rank.time_use import TimeUse

    def load_one() -> None:
        with loading:
            pass

    loading, time_use = InputTime(), TimeUse()
    batch_s = _seconds(load_one, rounds)
    plain_s = _seconds(lambda: gc.collect(0), rounds)
    gc.callbacks.append(time_use._time_collector)
    collection_s = max(0.0, _seconds(lambda: gc.collect(0), rounds) - plain_s)
    gc.callbacks.remove(time_use._time_collector)
    look_s = _seconds(lambda: time_use.read({}), rounds)
    # Of torch's backends the reporter looks ten times a second; 20 µs is more than a look at the recorder takes.
    total_s = batch_s + collection_s / 10 + (look_s + 10 * 20e-6) * STEP_S
    print(
        f"a batch {1e6 * batch_s:.2f} µs, a collection {1e6 * collection_s:.2f} µs, a look {1e6 * look_s:.1f} µs",
        file=sys.stderr,
    )
    ratio = 1 + total_s / STEP_S
    return Row(
        "parts, a step of 2 ms", "ms", "lower", 1e3 * (STEP_S + total_s), 1e3 * STEP_S, "off",
        {"median": ratio, "min": ratio, "max": ratio},
    )  # fmt: skip


def _seconds(act: Callable[[], object], rounds: int) -> float:
    """Return the median time of one call."""
    times = []
    for _ in range(9):
        began = time.perf_counter()
        for _ in range(rounds):
            act()
        times.append((time.perf_counter() - began) / rounds)
    return statistics.median(times)


def main() -> None:
    """Run the cases asked for."""
    asked = arguments(CASES)
    steps, pairs, rounds = (100, 1, 100) if asked.quick else (1000, 5, 5000)
    rows = [
        parts(rounds) if case == "parts" else compare(case, steps=steps, pairs=pairs) for case in CASES
        if case in asked.cases
    ]  # fmt: skip
    show("bench_slow", rows, as_json=asked.json)


if __name__ == "__main__":
    main()
