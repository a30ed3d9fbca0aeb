"""Predicted against published step times, with families of rows left out whole, and memory; `--fit` fits again.

The constants of a family's rows are fitted on the other families; no row has a constant of its own. Beside them stand
one constant efficiency, and the usual analytic formula: that efficiency, the pipeline's idle time and all-reduces at
the rate of the data sheet. Both are fitted without the family too.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.predict_fit import (
    FAMILIES,
    FITTED,
    linearise,
    predict_with,
    read_measured,
    read_published,
    seconds,
    source_of,
)
from phalanx.auto.cost.collectives import ClusterLinks
from phalanx.auto.cost.constants import DEFAULT
from phalanx.auto.predict.interval import estimate_interval
from phalanx.auto.predict.prediction import predict
from phalanx.auto.predict.rank_groups import group_topology
from phalanx.auto.predict.run_spec import RunSpec
from phalanx.auto.predict.transformer import boundary_bytes

Row = dict[str, float | str | int]
Estimate = Callable[[RunSpec], float]


def ideal_seconds(run: RunSpec) -> float:
    """Return the seconds of a step at the peak in 16 bit, recomputation counted."""
    flops = run.model.flops_per_token() * run.batch.whole * run.model.seq
    return flops * (4 / 3 if run.recompute == "full" else 1.0) / run.parallel.ranks / run.device.flops["bf16"]


def idle_share(run: RunSpec) -> float:
    """Return the idle time of a pipeline over its work."""
    return (run.parallel.pp - 1) / run.parallel.vpp / run.micro_batches


def communication_seconds(run: RunSpec) -> float:
    """Return the seconds of a step's all-reduces at the rate of the data sheet, none beside computation."""
    par, links = run.parallel, ClusterLinks(run.device, run.cluster.node_gbps, DEFAULT)
    each = 2 * links.all_reduce(boundary_bytes(run), group_topology(run, "tp"))
    layers = run.model.layers / par.pp
    gradients = links.all_reduce(run.element_bytes * run.block_parameters * layers, group_topology(run, "dp"))
    return (3 if run.recompute == "full" else 2) * each * layers * run.micro_batches + gradients


def fit_efficiency(runs: Sequence[RunSpec], share: Estimate) -> float:
    """Return the median over sources of what `share` says of their rows."""
    reached: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        reached[source_of(run)].append(share(run))
    return float(np.median([np.median(shares) for shares in reached.values()]))


def one_efficiency(runs: Sequence[RunSpec]) -> Estimate:
    """Return the baseline with one efficiency for all, fitted on `runs`."""
    efficiency = fit_efficiency(runs, lambda run: ideal_seconds(run) / seconds(run))
    return lambda run: ideal_seconds(run) / efficiency


def analytic(runs: Sequence[RunSpec]) -> Estimate:
    """Return the baseline of analytic formulas: one efficiency, idle time and all-reduces, fitted on `runs`."""

    def share(run: RunSpec) -> float:
        left = max(0.2 * seconds(run), seconds(run) - communication_seconds(run))
        return ideal_seconds(run) * (1 + idle_share(run)) / left

    efficiency = fit_efficiency(runs, share)
    return lambda run: ideal_seconds(run) * (1 + idle_share(run)) / efficiency + communication_seconds(run)


def left_out(runs: Sequence[RunSpec]) -> list[Row]:
    """Return one row a family, with all of its kind left out, and one for each kind: errors in % and coverage."""
    fit, rows = linearise(runs), []
    intervals = np.log([estimate_interval(run, DEFAULT) for run in runs]) - fit.centre[:, None]
    for kind, key in FAMILIES.items():
        names = np.array([key(run) for run in runs])
        off: dict[str, np.ndarray] = {way: np.zeros(len(runs)) for way in ("model", "efficiency", "analytic")}
        for name in sorted(set(names)):
            (own,) = np.nonzero(names == name)
            logs, others = fit.without(own), [run for run, family in zip(runs, names, strict=True) if family != name]
            estimates = one_efficiency(others), analytic(others)
            for row in own:
                off["model"][row] = predict_with(runs[row], logs) - fit.measured[row]
                for way, estimate in zip(("efficiency", "analytic"), estimates, strict=True):
                    off[way][row] = np.log(estimate(runs[row])) - fit.measured[row]
        rows += [_row(kind, name, off, intervals, names == name) for name in sorted(set(names))]
        rows.append(_row(kind, "all", off, intervals, np.full(len(runs), True)))
    return rows


def _row(kind: str, name: str, off: dict[str, np.ndarray], intervals: np.ndarray, own: np.ndarray) -> Row:
    row: Row = {"kind": kind, "family": name, "rows": int(own.sum())}
    for way, logs in off.items():
        sizes = np.abs(np.expm1(logs[own])) * 100
        row |= {f"{way}_median": float(np.median(sizes)), f"{way}_p90": float(np.quantile(sizes, 0.9))}
    measured, (low, high) = -off["model"][own], intervals[own].T
    row["covered"] = float(np.mean((low <= measured) & (measured <= high)) * 100)
    row["width"] = float(np.median(np.expm1((high - low) / 2)) * 100)
    return row


def memory_rows(runs: Sequence[RunSpec]) -> list[Row]:
    """Return the errors of memory in %, by source and of all; nothing in them is fitted."""
    sizes: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        if "memory_gib" in run.measured:
            predicted = predict(run, interval=False).memory_gib
            sizes[source_of(run)].append(abs(predicted / float(run.measured["memory_gib"]) - 1) * 100)
    every = [off for own in sizes.values() for off in own]
    return [
        {"source": source, "rows": len(off), "median": float(np.median(off)), "most": max(off)}
        for source, off in [*sorted(sizes.items()), ("all", every)]
    ]


JUDGED = (
    "ran",
    "ran, and is called infeasible",
    "ran out of memory",
    "ran out of memory, and is called feasible",
)


def judge_fit(runs: Sequence[RunSpec]) -> dict[str, list[str]]:
    """Return the names of runs that ran, and of those that ran out of memory, and which `fits` is wrong of.

    Args:
        runs: Published ones; where `measured` has `oom`, that is true, a run ended so.
    """
    judged: dict[str, list[str]] = {name: [] for name in JUDGED}
    for run in runs:
        fits, ran = predict(run, interval=False).fits, not run.measured.get("oom")
        judged["ran" if ran else "ran out of memory"].append(run.name)
        if fits != ran:
            judged["ran, and is called infeasible" if ran else "ran out of memory, and is called feasible"].append(
                run.name
            )
    return judged


def print_judged(judged: dict[str, list[str]]) -> None:
    """Print how many runs fit, and which should not have been called so."""
    grid = Table(title="whether runs fit: all published rows, those in doubt too")
    for name in ("a run that", "rows"):
        grid.add_column(name, justify="left" if name != "rows" else "right")
    for name, runs in judged.items():
        grid.add_row(name, str(len(runs)) + (f" ({', '.join(runs)})" if "," in name and runs else ""))
    Console(width=120).print(grid)


def print_memory(rows: Sequence[Row]) -> None:
    """Print the errors of memory."""
    grid = Table(title="|predicted / measured - 1| of memory in %: median, most")
    for name in ("source", "rows", "error"):
        grid.add_column(name, justify="left" if name == "source" else "right")
    for row in rows:
        grid.add_row(str(row["source"]), str(row["rows"]), f"{row['median']:.1f}  {row['most']:.1f}")
    Console(width=120).print(grid)


def print_left_out(rows: Sequence[Row]) -> None:
    """Print the errors of families that are left out."""
    grid = Table(title="family left out: |predicted / measured - 1| of step times in %, median and 90th percentile")
    for name in ("left out", "family", "rows", "model", "within 80 % interval", "+-", "one efficiency", "analytic"):
        grid.add_column(name, justify="left" if name in ("left out", "family") else "right")
    for row in rows:
        pairs = {way: f"{row[f'{way}_median']:.1f}  {row[f'{way}_p90']:.1f}" for way in WAYS}
        cells = [str(row["kind"]), str(row["family"]), str(row["rows"]), pairs["model"]]
        cells += [f"{row['covered']:.0f} %", f"{row['width']:.0f} %", pairs["efficiency"], pairs["analytic"]]
        grid.add_row(*cells, end_section=row["family"] == "all")
    Console(width=130).print(grid)


WAYS = ("model", "efficiency", "analytic")


def main() -> None:
    """Fit, or show the errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true", help="print the constants that all rows together say")
    parser.add_argument("--memory", action="store_true", help="only errors of memory, and whether runs fit")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="changes nothing: it takes seconds")
    options = parser.parse_args()
    runs = read_measured()
    if options.fit:
        values = np.exp(linearise(runs).solve(np.arange(len(runs))))
        print(json.dumps(dict(zip(FITTED, values.tolist(), strict=True)), indent=1))
        return
    rows = [] if options.memory else left_out(runs)
    if options.json:
        judged = {name: len(names) for name, names in judge_fit(read_published()).items()}
        print(json.dumps({"bench": "predict", "rows": rows, "memory": memory_rows(runs), "fits": judged}))
        return
    if not options.memory:
        print_left_out(rows)
    print_memory(memory_rows(runs))
    print_judged(judge_fit(read_published()))


if __name__ == "__main__":
    main()
