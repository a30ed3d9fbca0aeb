"""Peak memory of a rank as the planner predicts it against what it is, and which limits a Plan trains under.

    python -m benchmarks.bench_plan_memory [--quick] [--json] [--keep FOLDER]

Plans of the small models of `bench_plans` are trained for two steps: what a rank has to itself at most beside what it
had before the model was made, and what its tensors take at most. Then each is trained again in fresh processes, with
limits on a rank's memory (RLIMIT_DATA) around the measured peak: steps either end, or an allocation fails. The planner
calls a Plan feasible under a limit if it predicts no more; every other answer than what happened is named. What was
measured can be kept, and predicted again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # ranks are copies of this process, and every optimizer imports it
from rich.console import Console
from rich.table import Table

import phalanx as px
from benchmarks.bench_plans import Trained, find_pick
from benchmarks.plan_memory_rank import LARGE, OPTIMIZERS, measure, train_limited
from benchmarks.plans_grid import chosen_of, every_candidate
from benchmarks.report import machine
from phalanx.auto.auto_parallel import auto_parallel
from phalanx.auto.planner.report.result import PlanResult
from phalanx.errors import LaunchError
from phalanx.plan.value import Plan

BUDGETS = (0.7, 0.85, 1.0, 1.15, 1.3)
"""Limits, as parts of the measured peak."""

MIB = 2**20


@dataclass(frozen=True, slots=True)
class PlanMemory:
    """One Plan of a model, and what was measured of it."""

    optimizer: str
    ranks: int
    planned: Trained
    private: float
    """Bytes that a rank has to itself at the peak."""

    tensors: float
    """Bytes of its tensors at the peak."""

    trained: dict[str, bool] = field(default_factory=dict)
    """Whether steps ended under a limit, by the part of the measured peak that it is."""

    @classmethod
    def read(cls, entry: dict[str, Any]) -> PlanMemory:
        """Return one that was kept as JSON."""
        return cls(**{**entry, "planned": Trained.read(entry["planned"])})

    @property
    def kinds(self) -> dict[str, str]:
        """What kind of Plan it is, from several points of view."""
        config = self.planned.config
        return {
            "ranks": str(self.ranks),
            "optimizer": self.optimizer,
            "sharding": f"zero={config.zero}" if config.data > 1 else "one copy",
            "recompute": config.recompute,
            "tensor parallel": f"model={config.model}" if config.model > 1 else self._cut_by_rows(),
        }

    def _cut_by_rows(self) -> str:
        return "rows gathered" if any(way.style for way in self.planned.call_strategies) else "none"


def predicted_bytes(answer: PlanResult, planned: Trained) -> float:
    """Return what the planner says the fullest rank has at its peak."""
    problem, pick = find_pick(answer, planned)
    return problem.peak(pick)


def ask(name: str, optimizer: str, ranks: int) -> PlanResult:
    """Return what the planner says of a model, of data sheets: no peak depends on speeds."""
    make, batch, loss_fn = LARGE[name]
    torch.manual_seed(0)
    return auto_parallel(make(), batch(), loss_fn, cluster=f"cpux{ranks}", optimizer=optimizer, top_k=1)


def choose(name: str, ranks: int, most: int) -> list[Trained]:
    """Return some Plans of a model."""
    answer = ask(name, "sgd", ranks)
    return [Trained.of(chosen, answer) for chosen in chosen_of(list(every_candidate(answer, name, ranks)), most)]


def measure_peaks(planned: list[Trained], name: str, optimizer: str, ranks: int) -> list[PlanMemory]:
    """Return Plans of a model with the peaks of each."""
    peaks = px.launch(measure, ranks, [Plan.model_validate(trained.plan) for trained in planned], name, optimizer)
    return [PlanMemory(optimizer, ranks, trained, *peak) for trained, peak in zip(planned, peaks, strict=True)]


def ends_within(entry: PlanMemory, name: str, budget: float) -> bool:
    """Return whether fresh processes train within so many bytes each; anything but memory that ends them is raised."""
    plan = Plan.model_validate(entry.planned.plan)
    with tempfile.TemporaryDirectory() as folder:
        try:
            px.launch(train_limited, entry.ranks, plan, name, entry.optimizer, budget, Path(folder))
        except LaunchError:
            if not any(Path(folder).iterdir()):
                raise
            return False
    return True


def main() -> None:
    """Measure the cases asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(LARGE), help="which models, separated by commas")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--most", type=int, default=3, help="Plans of a model, optimizer and number of ranks")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="keep what is measured, a file a case; what is there is not again"
    )
    parser.add_argument("--quick", action="store_true", help="few Plans and limits, only to see that it works")
    parser.add_argument("--json", action="store_true", help="print all figures as one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(1)  # ranks are copies of this process, and threads are not copied
    rows = []
    for name, ranks in itertools.product(options.cases.split(","), options.ranks):
        print(f"{name}, {ranks} ranks", file=sys.stderr, flush=True)
        file = options.keep and options.keep / f"{name}_{ranks}.json"
        if file and file.exists():
            entries = [PlanMemory.read(entry) for entry in json.loads(file.read_text())]
        else:
            entries = list(_measure_case(name, ranks, 2 if options.quick else options.most, is_quick=options.quick))
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps([asdict(entry) for entry in entries]))
        answers = {optimizer: ask(name, optimizer, ranks) for optimizer in OPTIMIZERS}
        rows += [row_of(answers[entry.optimizer], name, entry) for entry in entries]
    if options.json:
        print(json.dumps({"bench": "bench_plan_memory", "machine": machine(), "rows": rows}))
    else:
        print_tables(rows)


def _measure_case(name: str, ranks: int, most: int, *, is_quick: bool) -> Iterator[PlanMemory]:
    """Yield some Plans of a model, measured with each optimizer."""
    planned, budgets = choose(name, ranks, most), (0.5, 1.5) if is_quick else BUDGETS
    for optimizer in ("adam",) if is_quick else OPTIMIZERS:
        for entry in measure_peaks(planned, name, optimizer, ranks):
            for budget in budgets:
                entry.trained[str(budget)] = ends_within(entry, name, budget * entry.private)
            yield entry


def row_of(answer: PlanResult, name: str, entry: PlanMemory) -> dict[str, Any]:
    """Return the figures of a Plan."""
    predicted = predicted_bytes(answer, entry.planned)
    layers = zip(answer.layers.calls, entry.planned.call_strategies, strict=True)
    return {
        "model": name,
        "plan": str(entry.planned.config),
        "layers": {call.path: str(way) for call, way in layers if way.style is not None},
        "kinds": entry.kinds,
        "predicted": predicted,
        "private": entry.private,
        "tensors": entry.tensors,
        "error": predicted / entry.private - 1,
        "limits": [
            {"part": float(part), "trained": trained, "feasible": predicted <= float(part) * entry.private}
            for part, trained in entry.trained.items()
        ],
    }


def count_answers(rows: Iterable[dict[str, Any]]) -> dict[float, Counter[tuple[bool, bool]]]:
    """Return how often steps ended or not under a limit that the planner calls feasible or not, by limit."""
    counts: dict[float, Counter[tuple[bool, bool]]] = {}
    for row in rows:
        for limit in row["limits"]:
            counts.setdefault(limit["part"], Counter())[limit["trained"], limit["feasible"]] += 1
    return counts


def print_tables(rows: list[dict[str, Any]]) -> None:
    """Print errors by kind of Plan, answers by limit, and every Plan."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(_error_table(rows))
    answers = Table(
        "limit / peak", "trained, feasible", "trained, infeasible", "ran out, infeasible", "ran out, feasible"
    )
    for part, count in sorted(count_answers(rows).items()):
        order = ((True, True), (True, False), (False, False), (False, True))
        answers.add_row(f"{part}", *(str(count[answer]) for answer in order))
    console.print(answers)
    plans = Table("model", "optimizer", "Plan", "layers", "predicted MiB", "private", "tensors", "error", "doubt at")
    for row in sorted(rows, key=lambda row: -abs(row["error"])):
        layers = ", ".join(f"{path} {way}" for path, way in row["layers"].items()) or "whole"
        doubt = [f"{limit['part']}" for limit in row["limits"] if limit["trained"] != limit["feasible"]]
        sizes = (f"{row[name] / MIB:.1f}" for name in ("predicted", "private", "tensors"))
        optimizer = row["kinds"]["optimizer"]
        plans.add_row(row["model"], optimizer, row["plan"], layers, *sizes, f"{row['error']:+.1%}", " ".join(doubt))
    console.print(plans)


def _error_table(rows: list[dict[str, Any]]) -> Table:
    by_kind: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        for kind in (("all", ""), ("model", row["model"]), *row["kinds"].items()):
            by_kind.setdefault(kind, []).append(row["error"])
    table = Table("kind", "", "Plans", "median error", "90th percentile", "least", "most")
    for (kind, value), errors in sorted(by_kind.items()):
        sizes = sorted(map(abs, errors))
        tenth = statistics.quantiles(sizes, n=10, method="inclusive")[-1] if len(sizes) > 1 else sizes[0]
        figures = (statistics.median(sizes), tenth, min(errors), max(errors))
        table.add_row(kind, value, str(len(errors)), *(f"{figure:.1%}" for figure in figures))
    return table


if __name__ == "__main__":
    main()
