"""Predicted against published step times and memory, beside one constant efficiency; `--fit` finds the constants again.

Sources are left out whole: the constants of a source's rows are fitted on the other sources. No row has a constant
of its own.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from phalanx.auto.constants import DEFAULT, Constants
from phalanx.auto.described_run import Run, read_runs
from phalanx.auto.predict import predict

PUBLISHED = Path(__file__).parent / "published" / "runs.jsonl"
BOUNDS = {
    "tile_start": (50.0, 400.0),
    "backward_rate": (0.75, 1.0),
    "stream": (0.6, 0.92),
    "kernel_gap_s": (1e-6, 8e-6),
    "launch_s": (5e-6, 6e-5),
    "compiled_launch_s": (2e-6, 3e-5),
    "attention": (0.3, 0.9),
    "score_passes": (0.3, 1.5),
    "network": (0.3, 0.92),
    "network_hop_s": (5e-6, 1e-4),
    "contention": (0.0, 0.6),
    "step_s": (0.0, 0.02),
}
"""What `--fit` may move, and how far physics lets it."""

ROWS_OF_WEIGHT = 40
"""A source with more rows counts as if it had this many."""


def source_of(run: Run) -> str:
    """Return a short name of where a row was published, one for each body of work and kind of device."""
    author = run.source.split("(")[0].split(" Table")[0].replace(" benchmarks", "").split(",")[0].strip()[:30]
    return f"{author} {run.cluster.device.split('-')[0]} {run.precision}"


def work_of(run: Run) -> str:
    """Return the body of work that is left out together."""
    return run.source.split()[0]


def seconds(run: Run) -> float:
    """Return the measured seconds of a step."""
    measured = run.measured_step_time_s
    assert measured is not None
    return measured


def fit(runs: Sequence[Run]) -> Constants:
    """Return the constants under which the logarithms of predicted times lie closest, robustly, sources weighted."""
    from scipy.optimize import least_squares

    names = list(BOUNDS)
    low, high = (np.array([BOUNDS[n][side] for n in names]) for side in (0, 1))
    counts = Counter(source_of(run) for run in runs)
    weight = np.array([math.sqrt(min(1.0, ROWS_OF_WEIGHT / counts[source_of(run)])) for run in runs])
    measured = np.log([seconds(run) for run in runs])

    def constants_at(point: np.ndarray) -> Constants:
        return replace(DEFAULT, **dict(zip(names, (low + point * (high - low)).tolist(), strict=True)))

    def misses(point: np.ndarray) -> np.ndarray:
        constants = constants_at(point)
        return weight * (np.log([predict(run, constants).step_time_s for run in runs]) - measured)

    start = np.array([getattr(DEFAULT, n) for n in names])
    start = np.clip((start - low) / (high - low), 0.02, 0.98)
    found = least_squares(misses, start, bounds=(0, 1), loss="soft_l1", f_scale=0.05, diff_step=1e-3, max_nfev=25)
    return constants_at(found.x)


def naive(runs: Sequence[Run]) -> Callable[[Run], float]:
    """Return the baseline: one efficiency for all, the median over sources, recomputation counted."""

    def ideal(run: Run) -> float:
        flops = run.model.flops_per_token() * run.batch.whole * run.model.seq
        again = 4 / 3 if run.recompute == "full" else 1.0
        return flops * again / run.parallel.ranks / run.device.flops["bf16"]

    reached: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        reached[source_of(run)].append(ideal(run) / seconds(run))
    efficiency = float(np.median([np.median(found) for found in reached.values()]))
    return lambda run: ideal(run) / efficiency


def errors(runs: Sequence[Run], predicted: Callable[[Run], float]) -> dict[str, list[float]]:
    """Return predicted / measured - 1 by source."""
    found: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        found[source_of(run)].append(predicted(run) / seconds(run) - 1)
    return found


def table(runs: Sequence[Run]) -> list[dict[str, float | str | int]]:
    """Return one row a source: with all constants, with that body of work left out, and the baseline."""
    rows: list[dict[str, float | str | int]] = []
    everything = errors(runs, lambda run: predict(run).step_time_s)
    for work in sorted({work_of(run) for run in runs}):
        own, others = [r for r in runs if work_of(r) == work], [r for r in runs if work_of(r) != work]
        constants, baseline = fit(others), naive(others)
        left_out = errors(own, lambda run, c=constants: predict(run, c).step_time_s)  # type: ignore[misc]
        plain = errors(own, baseline)
        for source in left_out:
            rows.append({"source": source, "rows": len(left_out[source])})
            for name, found in (("fitted", everything), ("left_out", left_out), ("naive", plain)):
                sizes = np.abs(found[source]) * 100
                rows[-1] |= {f"{name}_median": float(np.median(sizes)), f"{name}_p90": float(np.quantile(sizes, 0.9))}
    return rows


def show(rows: Sequence[dict[str, float | str | int]]) -> None:
    """Print the table of errors."""
    grid = Table(title="|predicted / measured - 1| of step times in %: median, 90th percentile")
    for name in ("source", "rows", "fitted on all", "source left out", "one efficiency"):
        grid.add_column(name, justify="left" if name == "source" else "right")
    for row in rows:
        pairs = (f"{row[f'{n}_median']:.1f}  {row[f'{n}_p90']:.1f}" for n in ("fitted", "left_out", "naive"))
        grid.add_row(str(row["source"]), str(row["rows"]), *pairs)
    Console(width=120).print(grid)


def main() -> None:
    """Fit, or show the errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true", help="print the constants that all rows together say")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    with PUBLISHED.open() as lines:
        runs = [r for r in read_runs(lines, PUBLISHED.name) if not r.doubt and r.measured_step_time_s]
    if chosen.fit:
        print(json.dumps(asdict(fit(runs)), indent=1))
        return
    rows = table(runs)
    if chosen.json:
        print(json.dumps({"bench": "predict", "rows": rows}))
    else:
        show(rows)


if __name__ == "__main__":
    main()
