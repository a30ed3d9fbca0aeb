"""Peak memory of a rank as the planner predicts it against what it is, and which limits a Plan trains under.

    python -m benchmarks.bench_plan_memory [--quick] [--json] [--keep FOLDER]

Plans of the small models of `bench_plans` are trained for two steps: what a rank has to itself at most beside what it
had before the model was made, and what its tensors take at most. Then each is trained again in fresh processes, with
limits on a rank's memory (RLIMIT_DATA) around the measured peak: steps either end, or an allocation fails. Both is done
with a loop that keeps the model's output, and with one that lets it go once it has the loss. The planner
calls a Plan feasible under a limit if it predicts no more; every other answer than what happened is named. Plans with
stages are measured without limits, the ranks of each stage by themselves. What was measured can be kept, and predicted
again.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
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
from phalanx.auto.cost.parallel_config import ParallelConfig
from phalanx.auto.planner.report.result import PlanResult
from phalanx.errors import LaunchError, PlanError
from phalanx.plan.value import Plan

STAGED: dict[int, tuple[tuple[str, ...], ...]] = {
    2: (
        ("pp=2", "micro=1"),
        ("pp=2", "micro=4", "schedule=1f1b"),
        ("pp=2", "micro=4", "schedule=interleaved"),
        ("pp=2", "micro=4", "schedule=zero_bubble"),
    ),
    4: (
        ("pp=4", "micro=8", "schedule=1f1b"),
        ("pp=2", "micro=4", "schedule=1f1b", "dp=2", "zero=0"),
        ("pp=2", "micro=4", "schedule=1f1b", "dp=2", "zero=2"),
        ("pp=2", "micro=4", "schedule=1f1b", "tp=2"),
    ),
}
"""Limits of a search for each Plan with stages, by ranks."""

BUDGETS = (0.7, 0.85, 1.0, 1.15, 1.3)
"""Limits, as parts of the measured peak."""

MIB = 2**20


@dataclass(frozen=True, slots=True)
class PlanMemory:
    """One Plan of a model, and what was measured of it."""

    optimizer: str
    ranks: int
    return_outputs: bool
    """Whether the loop keeps what the model returns."""

    planned: Trained
    private: tuple[float, ...]
    """Bytes that a rank has to itself at the peak: the most of the ranks at each place along the stages."""

    tensors: tuple[float, ...]
    """Bytes of its tensors at the peak, likewise."""

    trained: dict[str, bool] = field(default_factory=dict)
    """Whether steps ended under a limit, by the part of the measured peak that it is."""

    @classmethod
    def read(cls, entry: dict[str, Any]) -> PlanMemory:
        """Return one that was kept as JSON."""
        return cls(
            **{
                **entry,
                "planned": Trained.read(entry["planned"]),
                "private": tuple(entry["private"]),
                "tensors": tuple(entry["tensors"]),
            }
        )

    @property
    def kinds(self) -> dict[str, str]:
        """What kind of Plan it is, from several points of view."""
        config = self.planned.config
        return {
            "ranks": str(self.ranks),
            "optimizer": self.optimizer,
            "loop": self._loop(),
            "sharding": f"zero={config.zero}" if config.data > 1 else "one copy",
            "recompute": config.recompute,
            "stages": config.schedule,
            "tensor parallel": f"model={config.model}" if config.model > 1 else self._cut_by_rows(),
        }

    def _loop(self) -> str:
        if self.planned.config.stages > 1:
            return "px.train_step"
        return "out = model(x)" if self.return_outputs else "loss_fn(model(x), y)"

    def _cut_by_rows(self) -> str:
        return "rows gathered" if any(way.style for way in self.planned.call_strategies) else "none"


def predicted_bytes(answer: PlanResult, planned: Trained) -> list[float]:
    """Return what the planner says a rank has at its peak, by place along the stages."""
    problem, pick = find_pick(answer, planned)
    starts = () if answer.layers.partition_points is None else answer.layers.partition_points.starts
    begins = [starts.index(unit) for unit in planned.stages]
    stage_of = [sum(begin <= piece for begin in begins) for piece in range(problem.piece_count)]
    return [rank.total for rank in problem.memory(pick, stage_of)]


def ask(name: str, optimizer: str, ranks: int, *, return_outputs: bool = True) -> PlanResult:
    """Return what the planner says of a model, of data sheets: no peak depends on speeds."""
    make, batch, loss_fn = LARGE[name]
    torch.manual_seed(0)
    return auto_parallel(
        make(),
        batch(),
        loss_fn,
        cluster=f"cpux{ranks}",
        optimizer=optimizer,
        return_outputs=return_outputs,
        top_k=1,
    )


def choose(name: str, ranks: int, most: int) -> list[Trained]:
    """Return some Plans of a model without stages."""
    answer = ask(name, "sgd", ranks)
    return [Trained.of(chosen, answer) for chosen in chosen_of(list(every_candidate(answer, name, ranks)), most)]


def choose_staged(name: str, ranks: int) -> list[Trained]:
    """Return the Plans of a model with stages that there are of `STAGED`."""
    answer, chosen = ask(name, "sgd", ranks), []
    for limits in STAGED.get(ranks, ()):
        for recompute in ("none", "full")[: 2 if answer.layers.blocks else 1]:
            with contextlib.suppress(PlanError):  # no such Plan: a model may not be cut, or not so
                chosen.append(answer.search_again((*limits, f"recompute={recompute}")).best)
    return [Trained.of(candidate, answer) for candidate in chosen]


def measure_peaks(
    planned: list[Trained], name: str, optimizer: str, ranks: int, *, return_outputs: bool
) -> Iterator[PlanMemory]:
    """Yield Plans of a model with the peaks of each."""
    for trained in planned:
        by_rank = px.launch(measure, ranks, Plan.model_validate(trained.plan), name, optimizer, return_outputs)
        places = list_places(trained.config)
        at_places = [
            [peak for peak, at in zip(by_rank, places, strict=True) if at == place]
            for place in range(trained.config.stages)
        ]
        private, tensors = (tuple(max(peak[what] for peak in at) for at in at_places) for what in (0, 1))
        yield PlanMemory(optimizer, ranks, return_outputs, trained, private, tensors)


def list_places(config: ParallelConfig) -> list[int]:
    """Return the place of each rank along the stages."""
    inner = list(config.sizes)[list(config.sizes).index("pp") + 1 :]
    together = math.prod(config.sizes[kind] for kind in inner)
    return [rank // together % config.stages for rank in range(config.ranks)]


def ends_within(entry: PlanMemory, name: str, budget: float) -> bool:
    """Return whether fresh processes train within so many bytes each; anything but memory that ends them is raised."""
    plan = Plan.model_validate(entry.planned.plan)
    with tempfile.TemporaryDirectory() as folder:
        try:
            px.launch(
                train_limited, entry.ranks, plan, name, entry.optimizer, entry.return_outputs, budget, Path(folder)
            )
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
    parser.add_argument(
        "--most", type=int, default=3, help="Plans of a model, optimizer and number of ranks, without stages"
    )
    parser.add_argument("--only", choices=("layers", "stages"), help="only Plans without stages, or with them")
    parser.add_argument(
        "--loops",
        choices=("kept", "released"),
        nargs="+",
        default=["kept", "released"],
        help="of Plans without stages: loops that keep the model's output, or let it go once they have the loss",
    )
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="keep what is measured, a file a case; what is there is not again"
    )
    parser.add_argument("--quick", action="store_true", help="few Plans and limits, only to see that it works")
    parser.add_argument("--json", action="store_true", help="print all figures as one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(1)  # ranks are copies of this process, and threads are not copied
    rows = []
    kinds = [options.only] if options.only else ["layers"] if options.quick else ["layers", "stages"]
    for name, ranks, kind, loop in itertools.product(options.cases.split(","), options.ranks, kinds, options.loops):
        if kind == "stages" and (ranks not in STAGED or loop != options.loops[0]):
            continue  # px.train_step is the loop of stages
        print(f"{name}, {ranks} ranks, {kind}, output {loop}", file=sys.stderr, flush=True)
        case = f"{name}_{ranks}_{kind}" if kind == "stages" else f"{name}_{ranks}_{kind}_{loop}"
        file = options.keep and options.keep / f"{case}.json"
        return_outputs = loop == "kept" or kind == "stages"
        if file and file.exists():
            entries = [PlanMemory.read(entry) for entry in json.loads(file.read_text())]
        else:
            most = 2 if options.quick else options.most
            in_stages = kind == "stages"
            entries = list(
                _measure_case(name, ranks, most, in_stages, return_outputs=return_outputs, is_quick=options.quick)
            )
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps([asdict(entry) for entry in entries]))
        answers = {optimizer: ask(name, optimizer, ranks, return_outputs=return_outputs) for optimizer in OPTIMIZERS}
        rows += [row_of(answers[entry.optimizer], name, entry) for entry in entries]
    if options.json:
        print(json.dumps({"bench": "bench_plan_memory", "machine": machine(), "rows": rows}))
    else:
        print_tables(rows)


def _measure_case(
    name: str, ranks: int, most: int, in_stages: bool, *, return_outputs: bool, is_quick: bool
) -> Iterator[PlanMemory]:
    """Yield some Plans of a model, measured with each optimizer."""
    planned = choose_staged(name, ranks) if in_stages else choose(name, ranks, most)
    budgets: tuple[float, ...] = () if in_stages else (0.5, 1.5) if is_quick else BUDGETS
    for optimizer in ("adam",) if is_quick else OPTIMIZERS:
        for entry in measure_peaks(planned, name, optimizer, ranks, return_outputs=return_outputs):
            for budget in budgets:
                entry.trained[str(budget)] = ends_within(entry, name, budget * max(entry.private))
            yield entry


def row_of(answer: PlanResult, name: str, entry: PlanMemory) -> dict[str, Any]:
    """Return the figures of a Plan."""
    by_place = predicted_bytes(answer, entry.planned)
    predicted, private = max(by_place), max(entry.private)
    layers = zip(answer.layers.calls, entry.planned.call_strategies, strict=True)
    return {
        "model": name,
        "plan": str(entry.planned.config),
        "layers": {call.path: str(way) for call, way in layers if way.style is not None},
        "kinds": entry.kinds,
        "predicted": predicted,
        "private": private,
        "tensors": max(entry.tensors),
        "error": predicted / private - 1,
        "stages": [
            {"predicted": place, "private": measured, "tensors": tensors, "error": place / measured - 1}
            for place, measured, tensors in zip(by_place, entry.private, entry.tensors, strict=True)
        ],
        "limits": [
            {"part": float(part), "trained": trained, "feasible": predicted <= float(part) * private}
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
    columns = ("predicted MiB", "private", "tensors", "error", "of each stage", "doubt at")
    plans = Table("model", "optimizer", "Plan", "layers", *columns)
    for row in sorted(rows, key=lambda row: -abs(row["error"])):
        layers = ", ".join(f"{path} {way}" for path, way in row["layers"].items()) or "whole"
        doubt = [f"{limit['part']}" for limit in row["limits"] if limit["trained"] != limit["feasible"]]
        sizes = (f"{row[name] / MIB:.1f}" for name in ("predicted", "private", "tensors"))
        optimizer = row["kinds"]["optimizer"]
        stages = " ".join(f"{stage['error']:+.1%}" for stage in row["stages"]) if len(row["stages"]) > 1 else ""
        error = f"{row['error']:+.1%}"
        plans.add_row(row["model"], optimizer, row["plan"], layers, *sizes, error, stages, " ".join(doubt))
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
