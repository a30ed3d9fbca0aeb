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
    def of(cls, found: Candidate, answer: PlanResult) -> Trained:
        """Return a Plan that was not measured yet."""
        plan = build_plan(found, answer.layers).model_dump(mode="json")
        return cls(found.config, found.call_strategies, plan, found.stages)

    @classmethod
    def read(cls, kept: dict[str, Any]) -> Trained:
        """Return one that was kept as JSON."""
        picked = tuple(LayerStrategy(*way) for way in kept["call_strategies"])
        rounds = [tuple(one) for one in kept["rounds"]]
        return cls(ParallelConfig(**kept["config"]), picked, kept["plan"], tuple(kept.get("stages", ())), rounds)

    def seconds(self, usual: float, first: int = 0, step: int = 1) -> float:
        """Return the median over rounds, all of them or every `step`th, where the yardstick takes its usual time."""
        return statistics.median(taken * usual / beside for taken, beside, _ in self.rounds[first::step])


def train(chosen: list[Trained], name: str, ranks: int, *, steps: int, rounds: int) -> None:
    """Train all Plans for some more rounds, a few of them in each job."""
    before = max(len(one.rounds) for one in chosen)
    numbers = range(before, before + rounds)
    for first in numbers[::ROUNDS_A_JOB]:
        told = _job(chosen, name, ranks, steps, numbers[first - before :][:ROUNDS_A_JOB])
        for one, found in zip(chosen, told, strict=True):
            one.rounds.extend(tuple(taken) for taken in found)


def _job(chosen: list[Trained], name: str, ranks: int, steps: int, numbers: range) -> list[list[list[float]]]:
    """Return what one job measured of every Plan, round after round."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plans.json"
        path.write_text(json.dumps([one.plan for one in chosen]))
        launch = [sys.executable, "-m", "phalanx.launch", "-n", str(ranks), "--log-dir", folder]
        work = [RANK_SCRIPT, "--plans", path, "--model", name, "--steps", steps]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [*launch, *map(str, [*work, "--rounds", *numbers])], env=env, capture_output=True, text=True, timeout=3000
        )
    if done.returncode:
        raise RuntimeError(f"{name} on {ranks} ranks ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    line = next(line for line in done.stdout.splitlines() if "STEPS " in line)
    found: list[list[list[float]]] = json.loads(line.partition("STEPS ")[2])
    return found


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
        help="with --keep: hold what is measured against N calibrations, which are kept too",
    )
    parser.add_argument("--quick", action="store_true", help="a few Plans, only to see that it works")
    parser.add_argument("--json", action="store_true", help="print all figures as one JSON object")
    asked = parser.parse_args()
    if asked.calibrations > 1 and not asked.keep:
        parser.error("--calibrations needs --keep, for what they measure")
    folders: list[Path | None] = [None]
    if asked.calibrations > 1:
        folders = [asked.keep / f"calibration_{number}" for number in range(asked.calibrations)]
    told = []
    cases = list(itertools.product(asked.cases.split(","), asked.ranks))
    for name, ranks in track(cases, "measuring Plans", console=Console(stderr=True)):
        answers = list(_list_answers(name, ranks, folders, most_ranks=max(asked.ranks), quick=asked.quick))
        file = asked.keep and asked.keep / f"{name}_{ranks}.json"
        if file and file.exists():
            kept = json.loads(file.read_text())
            count, found = kept["plans"], [Trained.read(one) for one in kept["trained"]]
        else:
            everything = list(every_candidate(answers[0], name, ranks))
            chosen = chosen_of(everything, 4 if asked.quick else asked.most)
            count, found = len(everything), [Trained.of(one, answers[0]) for one in chosen]
        if asked.rounds:
            again = _fastest(found, asked.nearest) if asked.nearest and found[0].rounds else found
            train(again, name, ranks, steps=3 if asked.quick else 5, rounds=1 if asked.quick else asked.rounds)
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({"plans": count, "trained": [asdict(one) for one in found]}))
        if found[0].rounds:
            told.append(_is_reported(answers, f"{name} {ranks} ranks", count, found))
    if asked.json:
        print(json.dumps({"bench": "bench_plans", "machine": machine(), "rows": told}))
    else:
        _print_error(told)


def _list_answers(
    name: str, ranks: int, folders: list[Path | None], *, most_ranks: int, quick: bool
) -> Iterator[PlanResult]:
    """Yield what the planner says of a model under every calibration."""
    make, batch, loss_fn = MODELS[name]
    for folder in folders:
        calibrate(most_ranks, folder, quick=quick)
        torch.manual_seed(0)
        yield auto_parallel(make(), batch(), loss_fn, cluster=f"herex{ranks}", optimizer="sgd")


def _usual(found: list[Trained]) -> float:
    """Return what the yardstick takes in the median over all rounds."""
    return statistics.median(beside for one in found for _, beside, _ in one.rounds)


def _fastest(found: list[Trained], count: int) -> list[Trained]:
    """Return the fastest so far: which of them is the fastest is what few rounds cannot tell."""
    usual = _usual(found)
    return sorted(found, key=lambda one: one.seconds(usual))[:count]


def _is_reported(answers: list[PlanResult], case: str, count: int, found: list[Trained]) -> dict[str, Any]:
    """Return the figures of a case: a list where there is one for each calibration; Plans are told under the first."""
    usual = _usual(found)
    seconds = [one.seconds(usual) for one in found]
    halves = [[one.seconds(usual, first, 2) for one in found] for first in (0, 1)] if len(found[0].rounds) > 1 else []
    predictions = [[predicted_s(answer, one) for one in found] for answer in answers]
    paired = [list(zip(predicted, seconds, strict=True)) for predicted in predictions]
    return {
        "case": case,
        "plans": count,
        "measured": len(found),
        "rounds": min(len(one.rounds) for one in found),
        "spearman": [spearman(predicted, seconds) for predicted in predictions],
        "halves": spearman(*halves) if halves else None,
        "regret": [min(pairs)[1] / min(seconds) - 1 for pairs in paired],
        "median_error": [statistics.median(abs(p / s - 1) for p, s in pairs) for pairs in paired],
        "all": [
            {
                "plan": str(one.config),
                "layers": {
                    segment.path: str(way)
                    for segment, way in zip(answers[0].layers.calls, one.call_strategies, strict=True)
                    if way.style is not None
                },
                "predicted_ms": p * 1e3,
                "measured_ms": one.seconds(usual) * 1e3,
                "faults": statistics.median(faults for _, _, faults in one.rounds),
            }
            for one, p in zip(found, predictions[0], strict=True)
        ],
    }


def _print_error(told: list[dict[str, Any]]) -> None:
    grid = Table()
    for name in ("case", "plans", "measured", "rounds", "spearman", "halves", "regret", "median_error"):
        grid.add_column(name)
    for one in told:
        grid.add_row(
            str(one["case"]),
            str(one["plans"]),
            str(one["measured"]),
            str(one["rounds"]),
            ", ".join(f"{value:.3f}" for value in one["spearman"]),
            "" if one["halves"] is None else f"{one['halves']:.3f}",
            ", ".join(f"{value:.1%}" for value in one["regret"]),
            ", ".join(f"{value:.1%}" for value in one["median_error"]),
        )
    Console().print(grid)


if __name__ == "__main__":
    main()
