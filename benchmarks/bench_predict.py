"""Predicted against published step times and memory, beside one constant efficiency; `--fit` finds the constants again.

Sources are left out whole: the constants of a source's rows are fitted on the other sources. No row has a constant
of its own. `unseen.jsonl` are rows of a source that were looked at when everything was fitted, and stay so.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from phalanx.auto.cost.constants import DEFAULT, Constants
from phalanx.auto.predict.prediction import predict
from phalanx.auto.predict.run_file import read_runs
from phalanx.auto.predict.run_spec import RunSpec
from phalanx.cluster.spec import devices
from phalanx.cluster.spec.devices import Device

PUBLISHED = Path(__file__).parent / "published" / "runs.jsonl"
UNSEEN = PUBLISHED.with_name("unseen.jsonl")


Errors = dict[str, list[float]]
"""Predicted / measured - 1 by source."""


@dataclass(frozen=True)
class Known:
    """What is known of a constant before any row of a run is seen."""

    value: float
    spread: float
    """Standard deviation of its logarithm."""

    low: float
    high: float


KNOWN = {
    "tile_start": Known(200, 0.5, 50, 400),  # prologue and epilogue of tiles 32 to 64 deep, four in flight
    "backward_rate": Known(0.97, 0.04, 0.7, 1.0),  # SimuMax 1.2, A100 table: 0.741 forward, 0.742 and 0.707 backward
    "stream": Known(0.8, 0.15, 0.5, 0.95),  # the same: 0.91 on A100, 0.67 on B200
    "cast_bytes": Known(6.0, 0.4, 2.0, 12.0),  # read for the largest, read, written; once more for the other way round
    "kernel_gap_s": Known(4e-6, 0.5, 1e-6, 1e-5),
    "launch_s": Known(3.5e-5, 0.2, 5e-6, 8e-5),  # the same: 40 us beside A100, 30 us beside B200
    "compiled_launch_s": Known(1e-5, 0.5, 2e-6, 4e-5),
    "first_attention": Known(0.6, 0.3, 0.3, 1.0),  # T. Dao, "FlashAttention-2" (2023): 1.7 to 2 times the first
    "score_passes": Known(1.0, 0.3, 0.3, 2.0),
    "last_host_s": Known(1e-4, 0.7, 1e-6, 5e-4),
    "network": Known(0.85, 0.1, 0.3, 0.98),
    "network_hop_s": Known(1.4e-5, 0.5, 3e-6, 1e-4),  # NCCL 2.18 to 2.23, tuning.cc: ring, Simple, network
    "contention": Known(0.2, 0.7, 0.02, 0.8),  # Galvatron's profiles: 0.13
    "micro_batch_s": Known(1e-3, 0.7, 1e-4, 5e-3),
    "step_s": Known(5e-3, 0.7, 5e-4, 2e-2),
    "A100": Known(0.8, 0.1, 0.7, 0.95),  # bursts reach 0.87
    "H100": Known(0.7, 0.1, 0.55, 0.85),  # bursts reach 0.80
}
"""What `--fit` may move, and how far physics lets it; a kind of device stands for the share of its peak it sustains."""

WEIGHT_OF_KNOWLEDGE = 3.0
"""How many rows, each off by 5 %, one standard deviation counts as, squared."""

ROWS_LOOKED_AT = 40
"""Rows of a source that a fit looks at, every so many-th of them: no source outweighs the others, and it ends soon."""


def source_of(run: RunSpec) -> str:
    """Return a short name of where a row was published, one for each body of work and kind of device."""
    author = run.source.split("(")[0].split(" Table")[0].replace(" benchmarks", "").split(",")[0].strip()[:30]
    return f"{author} {run.cluster.device.split('-')[0]} {run.precision}"


def work_of(run: RunSpec) -> str:
    """Return the body of work that is left out together."""
    return run.source.split()[0]


def is_measured(run: RunSpec) -> bool:
    """Return whether a step was measured: vTrain's of a single node were simulated (docs/design/predict.md)."""
    return "vTrain single-node" not in run.source


def seconds(run: RunSpec) -> float:
    """Return the measured seconds of a step."""
    measured = run.measured_step_time_s
    assert measured is not None
    return measured


@dataclass(frozen=True)
class Fitted:
    """Constants, and for each kind of device the share of its peak that it sustains over that of the presets."""

    constants: Constants
    sustained: dict[str, float]

    def seconds(self, run: RunSpec) -> float:
        """Return the predicted seconds of a step."""
        device = run.device
        ratio = self.sustained.get(kind_of(device), 1.0)
        if ratio != 1.0:
            figures = replace(device, sustained=device.sustained * ratio)
            run = run.model_copy(update={"cluster": run.cluster.model_copy(update={"figures": figures})})
        return predict(run, self.constants).step_time_s


def kind_of(device: Device) -> str:
    """Return the kind of a device: H200 and H800 compute as H100 do."""
    kind = device.name.split("-")[0]
    return "H100" if kind in ("H200", "H800") else kind


SUSTAINED = {"A100": devices.A100, "H100": devices.H100}
AS_SHIPPED = Fitted(DEFAULT, {})


def fit(runs: Sequence[RunSpec]) -> Fitted:
    """Return the constants under which the logarithms of predicted times lie closest, robustly."""
    from scipy.optimize import least_squares

    names = list(KNOWN)
    low, high = (np.array([getattr(k, side) for k in KNOWN.values()]) for side in ("low", "high"))
    before, spread = (np.array([getattr(k, name) for k in KNOWN.values()]) for name in ("value", "spread"))
    runs = _thinned(runs)
    measured = np.log([seconds(run) for run in runs])

    def fitted_at(point: np.ndarray) -> Fitted:
        values = dict(zip(names, (low + point * (high - low)).tolist(), strict=True))
        ratios = {kind: values.pop(kind) / shipped for kind, shipped in SUSTAINED.items()}
        return Fitted(replace(DEFAULT, **values), ratios)

    def misses(point: np.ndarray) -> np.ndarray:
        fitted = fitted_at(point)
        rows = np.log([fitted.seconds(run) for run in runs]) - measured
        known = WEIGHT_OF_KNOWLEDGE * 0.05 * np.log((low + point * (high - low)) / before) / spread
        return np.concatenate([rows, known])

    start = np.clip((before - low) / (high - low), 0.02, 0.98)
    found = least_squares(misses, start, bounds=(0, 1), loss="soft_l1", f_scale=0.05, diff_step=1e-3, max_nfev=14)
    return fitted_at(found.x)


def _thinned(runs: Sequence[RunSpec]) -> list[RunSpec]:
    """Return so many rows of each source at most, spread over all of them."""
    rows: dict[str, list[RunSpec]] = defaultdict(list)
    for run in runs:
        rows[source_of(run)].append(run)
    return [run for mine in rows.values() for run in mine[:: math.ceil(len(mine) / ROWS_LOOKED_AT)]]


def naive(runs: Sequence[RunSpec]) -> Callable[[RunSpec], float]:
    """Return the baseline: one efficiency for all, the median over sources, recomputation counted."""

    def ideal(run: RunSpec) -> float:
        flops = run.model.flops_per_token() * run.batch.whole * run.model.seq
        again = 4 / 3 if run.recompute == "full" else 1.0
        return flops * again / run.parallel.ranks / run.device.flops["bf16"]

    reached: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        reached[source_of(run)].append(ideal(run) / seconds(run))
    efficiency = float(np.median([np.median(found) for found in reached.values()]))
    return lambda run: ideal(run) / efficiency


def errors(runs: Sequence[RunSpec], predicted: Callable[[RunSpec], float]) -> Errors:
    """Return predicted / measured - 1 by source."""
    found: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        found[source_of(run)].append(predicted(run) / seconds(run) - 1)
    return found


def table(runs: Sequence[RunSpec], unseen: Sequence[RunSpec]) -> list[dict[str, float | str | int]]:
    """Return one row a source: with all constants, with that body of work left out, and the baseline; then sums."""
    columns: dict[str, Errors] = {}
    for work in sorted({work_of(run) for run in runs}):
        for column, found in _columns(runs, work, [run for run in runs if work_of(run) == work]).items():
            columns.setdefault(column, {}).update(found)
    everything, measured = set(columns["fitted"]), {source_of(run) for run in runs if is_measured(run)}
    rows = [_row(source, columns, {source}) for source in columns["fitted"]]
    rows += [_row("all that were measured", columns, measured), _row("all", columns, everything)]
    apart = _columns(runs, work_of(unseen[0]), unseen)
    return [*rows, _row("looked at afterwards", apart, set(apart["fitted"]))]


def _columns(runs: Sequence[RunSpec], work: str, own: Sequence[RunSpec]) -> dict[str, Errors]:
    """Return the errors of rows of a body of work; what is fitted without it is fitted on the others of `runs`."""
    others = [run for run in runs if work_of(run) != work]
    ways = {"fitted": AS_SHIPPED.seconds, "left_out": fit(others).seconds, "naive": naive(others)}
    return {column: errors(own, predicted) for column, predicted in ways.items()}


def _row(name: str, columns: dict[str, Errors], sources: set[str]) -> dict[str, float | str | int]:
    row: dict[str, float | str | int] = {"source": name}
    for column, found in columns.items():
        sizes = np.abs([one for source in sorted(sources) for one in found[source]]) * 100
        row |= {f"{column}_median": float(np.median(sizes)), f"{column}_p90": float(np.quantile(sizes, 0.9))}
        row["rows"] = len(sizes)
    return row


def memory_rows(runs: Sequence[RunSpec]) -> list[dict[str, float | str | int]]:
    """Return the errors of memory by source; nothing in them is fitted."""
    found: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        if "memory_gib" in run.measured:
            found[source_of(run)].append(abs(predict(run).memory_gib / float(run.measured["memory_gib"]) - 1) * 100)
    return [
        {"source": source, "rows": len(all_of), "median": float(np.median(all_of)), "most": max(all_of)}
        for source, all_of in sorted(found.items())
    ]


def show_memory(rows: Sequence[dict[str, float | str | int]]) -> None:
    """Print the errors of memory."""
    grid = Table(title="|predicted / measured - 1| of memory in %: median, most")
    for name in ("source", "rows", "error"):
        grid.add_column(name, justify="left" if name == "source" else "right")
    for row in rows:
        grid.add_row(str(row["source"]), str(row["rows"]), f"{row['median']:.1f}  {row['most']:.1f}")
    Console(width=120).print(grid)


def show(rows: Sequence[dict[str, float | str | int]]) -> None:
    """Print the table of errors."""
    grid = Table(title="|predicted / measured - 1| of step times in %: median, 90th percentile")
    for name in ("source", "rows", "fitted on all", "source left out", "one efficiency"):
        grid.add_column(name, justify="left" if name == "source" else "right")
    for row in rows:
        pairs = (f"{row[f'{n}_median']:.1f}  {row[f'{n}_p90']:.1f}" for n in ("fitted", "left_out", "naive"))
        grid.add_row(str(row["source"]), str(row["rows"]), *pairs)
    Console(width=120).print(grid)


def _timed(path: Path) -> list[RunSpec]:
    with path.open() as lines:
        return [run for run in read_runs(lines, path.name) if not run.doubt and run.measured_step_time_s]


def main() -> None:
    """Fit, or show the errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true", help="print the constants that all rows together say")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="changes nothing: it takes seconds")
    chosen = parser.parse_args()
    runs, unseen = (_timed(path) for path in (PUBLISHED, UNSEEN))
    if chosen.fit:
        fitted = fit(runs)
        print(json.dumps({name: getattr(fitted.constants, name) for name in KNOWN if name not in SUSTAINED}, indent=1))
        print(json.dumps({kind: ratio * SUSTAINED[kind] for kind, ratio in fitted.sustained.items()}))
        return
    rows = table(runs, unseen)
    if chosen.json:
        print(json.dumps({"bench": "predict", "rows": rows, "memory": memory_rows(runs)}))
    else:
        show(rows)
        show_memory(memory_rows(runs))


if __name__ == "__main__":
    main()
