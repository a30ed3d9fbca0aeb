"""Predicted against measured: all Plans of a small model on this machine, as `phalanx calibrate` measured it.

Says how well the prediction orders the Plans (Spearman), how much slower the picked one is than the fastest of those
measured (regret), and how far predictions are off; beside it, how well every other round orders the Plans as the rest
of the rounds do: what is missing to 1 is noise of the measurement. A shared host changes its speed in seconds, so steps
are related to a yardstick timed beside each. From job to job the same two Plans differ by 6 % one way to 9 % the other,
so rounds are spread over jobs. What was measured can be kept, measured further, and predicted again after another
calibration.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.plans_grid import chosen_of, every_candidate
from benchmarks.plans_rank import MODELS
from benchmarks.report import machine
from phalanx.auto.auto_parallel import auto_parallel
from phalanx.auto.capture.layers import LayerStrategy
from phalanx.auto.cost.parallel_config import ParallelConfig
from phalanx.auto.planner.candidate import Candidate
from phalanx.auto.planner.report.result import PlanResult
from phalanx.auto.planner.strategies import build_problem
from phalanx.auto.planner.to_plan import build_plan
from phalanx.auto.solver.problem import StepProblem
from phalanx.cluster.calibration.figures import read_measured
from phalanx.errors import ConfigError

ROOT = Path(__file__).parent.parent
RANK_SCRIPT = ROOT / "benchmarks" / "plans_rank.py"


ROUNDS_A_JOB = 2


@dataclass(frozen=True, slots=True)
class Trained:
    """One Plan and what was measured of it."""

    config: ParallelConfig
    call_strategies: tuple[LayerStrategy, ...]
    """How each segment is computed."""

    plan: dict[str, Any]
    """As ranks read it."""

    stages: tuple[str, ...] = ()
    """The units that stages 1, 2, ... begin with."""

    rounds: list[tuple[float, float, float]] = field(default_factory=list)
    """Of every round: seconds of a step, seconds of the yardstick beside it, and pages that a rank touches for the
    first time in a step."""

    @classmethod
    def of(cls, candidate: Candidate, answer: PlanResult) -> Trained:
        """Return a Plan that was not measured yet."""
        plan = build_plan(candidate, answer.layers).model_dump(mode="json")
        return cls(candidate.config, candidate.call_strategies, plan, candidate.stages)

    @classmethod
    def read(cls, entry: dict[str, Any]) -> Trained:
        """Return one that was kept as JSON."""
        strategies = tuple(LayerStrategy(*fields) for fields in entry["call_strategies"])
        rounds = [tuple(figures) for figures in entry["rounds"]]
        return cls(ParallelConfig(**entry["config"]), strategies, entry["plan"], tuple(entry.get("stages", ())), rounds)

    def seconds(self, usual: float, first: int = 0, step: int = 1) -> float:
        """Return the median over rounds, all of them or every `step`th, where the yardstick takes its usual time."""
        return statistics.median(taken * usual / beside for taken, beside, _ in self.rounds[first::step])


def train(chosen: list[Trained], name: str, ranks: int, *, steps: int, rounds: int) -> None:
    """Train all Plans for some more rounds, a few of them in each job."""
    before = max(len(trained.rounds) for trained in chosen)
    numbers = range(before, before + rounds)
    for first in numbers[::ROUNDS_A_JOB]:
        figures = _job(chosen, name, ranks, steps, numbers[first - before :][:ROUNDS_A_JOB])
        for trained, of_plan in zip(chosen, figures, strict=True):
            trained.rounds.extend(tuple(of_round) for of_round in of_plan)


def _job(chosen: list[Trained], name: str, ranks: int, steps: int, numbers: range) -> list[list[list[float]]]:
    """Return what one job measured of every Plan, round after round."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plans.json"
        path.write_text(json.dumps([trained.plan for trained in chosen]))
        launch = [sys.executable, "-m", "phalanx.launch", "-n", str(ranks), "--log-dir", folder]
        work = [RANK_SCRIPT, "--plans", path, "--model", name, "--steps", steps]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [*launch, *map(str, [*work, "--rounds", *numbers])], env=env, capture_output=True, text=True, timeout=3000
        )
    if done.returncode:
        raise RuntimeError(f"{name} on {ranks} ranks ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    line = next(line for line in done.stdout.splitlines() if "STEPS " in line)
    figures: list[list[list[float]]] = json.loads(line.partition("STEPS ")[2])
    return figures


def find_pick(answer: PlanResult, planned: Trained) -> tuple[StepProblem, dict[str, int]]:
    """Return the problem of a Plan's parallel config, and the place of the Plan's option by decision."""
    config_problem, pick = build_problem(answer.work, planned.config, answer.catalog.of(planned.config)), {}
    for call, strategy in zip(answer.layers.calls, planned.call_strategies, strict=True):
        decision = str(call.template)
        pick[decision] = config_problem.strategies[decision].index(strategy)
    return config_problem.problem, pick


def predicted_s(answer: PlanResult, planned: Trained) -> float:
    """Return what the planner says a step takes."""
    problem, pick = find_pick(answer, planned)
    return problem.seconds(pick)


def calibrate(ranks: int, folder: Path | None, *, quick: bool) -> None:
    """Measure this machine, unless it was with so many ranks; from now on its figures count.

    Args:
        ranks: That compute at once.
        folder: Where its figures are kept; where this user's are when None.
        quick: Measure little.
    """
    if folder is not None:
        os.environ["XDG_CACHE_HOME"] = str(folder.resolve())
    try:
        read_measured().at(ranks)
    except ConfigError:
        command = [sys.executable, "-m", "phalanx", "calibrate", "-n", str(ranks), *["--quick"] * quick]
        subprocess.run(command, check=True, stdout=sys.stderr)


def spearman(first: list[float], second: list[float]) -> float:
    """Return the rank correlation (C. Spearman, 1904), without ties."""
    places = [{value: place for place, value in enumerate(sorted(values))} for values in (first, second)]
    return statistics.correlation([places[0][v] for v in first], [places[1][v] for v in second])


def main() -> None:
    """Measure the cases asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(MODELS), help="which models, separated by commas")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--most", type=int, default=40, help="Plans of a case to measure")
    parser.add_argument("--rounds", type=int, default=5, help="times to train under each, of which the median counts")
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="keep what is measured, a file a case; Plans that are kept there get further rounds, with --rounds 0 none",
    )
    parser.add_argument(
        "--nearest", type=int, metavar="N", help="with --keep: give further rounds to the N fastest of those kept only"
    )
    parser.add_argument(
        "--calibrations",
        type=int,
        default=1,
        metavar="N",
        help="with --keep: compare what is measured with the predictions of N calibrations, which are kept too",
    )
    parser.add_argument("--quick", action="store_true", help="a few Plans, only to see that it works")
    parser.add_argument("--json", action="store_true", help="print all figures as one JSON object")
    options = parser.parse_args()
    if options.calibrations > 1 and not options.keep:
        parser.error("--calibrations needs --keep, for what they measure")
    folders: list[Path | None] = [None]
    if options.calibrations > 1:
        folders = [options.keep / f"calibration_{number}" for number in range(options.calibrations)]
    rows = []
    cases = list(itertools.product(options.cases.split(","), options.ranks))
    for name, ranks in track(cases, "measuring Plans", console=Console(stderr=True)):
        answers = list(_list_answers(name, ranks, folders, most_ranks=max(options.ranks), quick=options.quick))
        file = options.keep and options.keep / f"{name}_{ranks}.json"
        if file and file.exists():
            kept = json.loads(file.read_text())
            count, plans = kept["plans"], [Trained.read(entry) for entry in kept["trained"]]
        else:
            candidates = list(every_candidate(answers[0], name, ranks))
            chosen = chosen_of(candidates, 4 if options.quick else options.most)
            count, plans = len(candidates), [Trained.of(candidate, answers[0]) for candidate in chosen]
        if options.rounds:
            again = _fastest(plans, options.nearest) if options.nearest and plans[0].rounds else plans
            train(again, name, ranks, steps=3 if options.quick else 5, rounds=1 if options.quick else options.rounds)
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({"plans": count, "trained": [asdict(plan) for plan in plans]}))
        if plans[0].rounds:
            rows.append(_case_row(answers, f"{name} {ranks} ranks", count, plans))
    if options.json:
        print(json.dumps({"bench": "bench_plans", "machine": machine(), "rows": rows}))
    else:
        _print_table(rows)


def _list_answers(
    name: str, ranks: int, folders: list[Path | None], *, most_ranks: int, quick: bool
) -> Iterator[PlanResult]:
    """Yield what the planner says of a model under every calibration."""
    make, batch, loss_fn = MODELS[name]
    for folder in folders:
        calibrate(most_ranks, folder, quick=quick)
        torch.manual_seed(0)
        yield auto_parallel(make(), batch(), loss_fn, cluster=f"herex{ranks}", optimizer="sgd")


def _usual(plans: list[Trained]) -> float:
    """Return what the yardstick takes in the median over all rounds."""
    return statistics.median(beside for plan in plans for _, beside, _ in plan.rounds)


def _fastest(plans: list[Trained], count: int) -> list[Trained]:
    """Return the fastest so far: which of them is the fastest is what few rounds cannot tell."""
    usual = _usual(plans)
    return sorted(plans, key=lambda plan: plan.seconds(usual))[:count]


def _case_row(answers: list[PlanResult], case: str, count: int, plans: list[Trained]) -> dict[str, Any]:
    """Return the figures of a case: a list where each calibration has its own; Plans by the first."""
    usual = _usual(plans)
    seconds = [plan.seconds(usual) for plan in plans]
    halves = [[plan.seconds(usual, first, 2) for plan in plans] for first in (0, 1)] if len(plans[0].rounds) > 1 else []
    predictions = [[predicted_s(answer, plan) for plan in plans] for answer in answers]
    paired = [list(zip(predicted, seconds, strict=True)) for predicted in predictions]
    return {
        "case": case,
        "plans": count,
        "measured": len(plans),
        "rounds": min(len(plan.rounds) for plan in plans),
        "spearman": [spearman(predicted, seconds) for predicted in predictions],
        "halves": spearman(*halves) if halves else None,
        "regret": [min(pairs)[1] / min(seconds) - 1 for pairs in paired],
        "median_error": [statistics.median(abs(p / s - 1) for p, s in pairs) for pairs in paired],
        "all": [
            {
                "plan": str(plan.config),
                "layers": {
                    call.path: str(strategy)
                    for call, strategy in zip(answers[0].layers.calls, plan.call_strategies, strict=True)
                    if strategy.style is not None
                },
                "predicted_ms": p * 1e3,
                "measured_ms": plan.seconds(usual) * 1e3,
                "faults": statistics.median(faults for _, _, faults in plan.rounds),
            }
            for plan, p in zip(plans, predictions[0], strict=True)
        ],
    }


def _print_table(rows: list[dict[str, Any]]) -> None:
    grid = Table()
    for name in ("case", "plans", "measured", "rounds", "spearman", "halves", "regret", "median_error"):
        grid.add_column(name)
    for row in rows:
        grid.add_row(
            str(row["case"]),
            str(row["plans"]),
            str(row["measured"]),
            str(row["rounds"]),
            ", ".join(f"{value:.3f}" for value in row["spearman"]),
            "" if row["halves"] is None else f"{row['halves']:.3f}",
            ", ".join(f"{value:.1%}" for value in row["regret"]),
            ", ".join(f"{value:.1%}" for value in row["median_error"]),
        )
    Console().print(grid)


if __name__ == "__main__":
    main()
