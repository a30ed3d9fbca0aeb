"""Predicted against measured: all Plans of a small model on this machine, as `phalanx calibrate` measured it.

Says how well the prediction orders the Plans (Spearman), how much slower the picked one is than the fastest of those
measured (regret), and how far predictions are off.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.plans_rank import MODELS
from benchmarks.report import machine
from phalanx.auto.auto_parallel import auto_parallel
from phalanx.auto.planned import Planned
from phalanx.auto.planner import Candidate, arrangements_of
from phalanx.auto.written_plan import written
from phalanx.cluster.measured import read_measured
from phalanx.errors import ConfigError, PlanError

ROOT = Path(__file__).parent.parent
RANK_SCRIPT = ROOT / "benchmarks" / "plans_rank.py"


@dataclass(frozen=True, slots=True)
class Measured:
    """One Plan, predicted and measured, in seconds."""

    candidate: Candidate
    seconds: float


GRID: dict[str, dict[tuple[str, ...], tuple[tuple[str, ...], ...]]] = {
    "transformer": {
        ("tokens",): (("whole",), ("vocab",)),
        ("blocks.*.[qkv]", "blocks.*.o"): (("whole", "whole"), ("column", "row"), ("column", "whole"), ("row", "row")),
        ("blocks.*.mlp.0", "blocks.*.mlp.2"): (("whole", "whole"), ("column", "row"), ("whole", "row"), ("row", "row")),
        ("head",): (("whole",), ("column",), ("row",)),
    },
    "alexnet": {(f"classifier.{place}",): (("whole",), ("column",), ("row",)) for place in (0, 2, 4)},
}
"""Layers that are styled together, and in which styles."""


def every_candidate(answer: Planned, name: str, ranks: int) -> Iterator[Candidate]:
    """Yield the best Plan of every arrangement and every combination of styles in the grid, each once."""
    met = set()
    grid = GRID[name]
    for at in arrangements_of(ranks, has_blocks=bool(answer.layers.blocks)):
        where = (f"dp={at.data}", f"tp={at.model}", f"zero={at.zero}", f"recompute={at.recompute}")
        for styles in itertools.product(*grid.values()):
            said = [
                f"{layer}={style}"
                for layers, group in zip(grid, styles, strict=True)
                for layer, style in zip(layers, group, strict=True)
            ]
            try:
                found = answer.search_again((*where, *said)).best
            except PlanError:
                continue  # no such styles under this arrangement
            key = str(at), tuple(found.ways.items())
            if key not in met:
                met.add(key)
                yield found


def chosen_of(found: list[Candidate], most: int) -> list[Candidate]:
    """Return at most so many of all Plans, the fastest and the slowest among them, evenly over the order."""
    ordered = sorted(found, key=lambda one: one.seconds)
    step = max(1.0, (len(ordered) - 1) / (most - 1))
    return [ordered[round(place * step)] for place in range(min(most, len(ordered)))]


def measured(
    answer: Planned, chosen: list[Candidate], name: str, ranks: int, *, steps: int, rounds: int
) -> list[float]:
    """Train all Plans in one job; return their seconds."""
    plans = [written(one, answer.layers).model_dump(mode="json") for one in chosen]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plans.json"
        path.write_text(json.dumps(plans))
        launch = [sys.executable, "-m", "phalanx.launch", "-n", str(ranks), "--log_dir", folder]
        work = [RANK_SCRIPT, "--plans", path, "--model", name, "--steps", steps, "--rounds", rounds]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run([*launch, *map(str, work)], env=env, capture_output=True, text=True, timeout=3000)
    if done.returncode:
        raise RuntimeError(f"{name} on {ranks} ranks ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    line = next(line for line in done.stdout.splitlines() if "SECONDS " in line)
    return [float(one) for one in json.loads(line.partition("SECONDS ")[2])]


def calibrate(ranks: int, *, quick: bool) -> None:
    """Measure this machine, unless it was with so many ranks."""
    try:
        read_measured().at(ranks)
    except ConfigError:
        command = [sys.executable, "-m", "phalanx", "calibrate", "-n", str(ranks), *["--quick"] * quick]
        subprocess.run(command, check=True, stdout=sys.stderr)


def spearman(one: list[float], other: list[float]) -> float:
    """Return the rank correlation (C. Spearman, 1904), without ties."""
    places = [{value: place for place, value in enumerate(sorted(values))} for values in (one, other)]
    return statistics.correlation([places[0][v] for v in one], [places[1][v] for v in other])


def main() -> None:
    """Measure the cases asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(MODELS), help="which models, separated by commas")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--most", type=int, default=40, help="Plans of a case to measure")
    parser.add_argument("--quick", action="store_true", help="a few Plans, only to see that it works")
    parser.add_argument("--json", action="store_true", help="print all figures as one JSON object")
    asked = parser.parse_args()
    calibrate(max(asked.ranks), quick=asked.quick)
    told = []
    cases = list(itertools.product(asked.cases.split(","), asked.ranks))
    for name, ranks in track(cases, "measuring Plans", console=Console(stderr=True)):
        make, batch, loss_fn = MODELS[name]
        torch.manual_seed(0)
        answer = auto_parallel(make(), batch(), loss_fn, cluster=f"herex{ranks}", optimizer="sgd")
        everything = list(every_candidate(answer, name, ranks))
        chosen = chosen_of(everything, 4 if asked.quick else asked.most)
        seconds = measured(answer, chosen, name, ranks, steps=3 if asked.quick else 9, rounds=1 if asked.quick else 3)
        told.append(_told(name, ranks, len(everything), chosen, seconds))
    if asked.json:
        print(json.dumps({"bench": "bench_plans", "machine": machine(), "rows": told}))
    else:
        _show(told)


def _told(name: str, ranks: int, count: int, chosen: list[Candidate], seconds: list[float]) -> dict[str, object]:
    predicted = [one.seconds for one in chosen]
    errors = sorted(abs(p / s - 1) for p, s in zip(predicted, seconds, strict=True))
    return {
        "case": f"{name} {ranks} ranks",
        "plans": count,
        "measured": len(chosen),
        "spearman": spearman(predicted, seconds),
        "regret": seconds[0] / min(seconds) - 1,
        "median_error": statistics.median(errors),
        "all": [
            {
                "plan": str(one.arrangement),
                "layers": {path: str(way) for path, way in one.cut.items()},
                "predicted_ms": one.seconds * 1e3,
                "measured_ms": s * 1e3,
                "parts_ms": {part: value * 1e3 for part, value in one.parts.items()},
            }
            for one, s in zip(chosen, seconds, strict=True)
        ],
    }


def _show(told: list[dict[str, object]]) -> None:
    grid = Table()
    for name in ("case", "plans", "measured", "spearman", "regret", "median_error"):
        grid.add_column(name)
    for one in told:
        grid.add_row(
            str(one["case"]),
            str(one["plans"]),
            str(one["measured"]),
            f"{one['spearman']:.3f}",
            f"{one['regret']:.1%}",
            f"{one['median_error']:.1%}",
        )
    Console().print(grid)


if __name__ == "__main__":
    main()
