"""The least memory that a planner names is what some Plan attains, and no Plan needs less."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from random import Random

import pytest
import torch
from torch import nn

import phalanx as px
from phalanx.auto.planner.report.result import PlanResult
from phalanx.auto.solver import min_memory
from phalanx.auto.solver.min_memory import MinMemory, find_min_memory, largest_part, minimize_peak, peak_lower_bound
from phalanx.auto.solver.problem import StepProblem
from phalanx.auto.solver.solve import solve
from phalanx.errors import PlanError
from unit.test_auto_parallel import FixedHeads
from unit.test_choices import all_picks
from unit.test_choices import random_choices as choices_together
from unit.test_staged import random_choices, repeated_choices, uneven_choices


def tried(choices: StepProblem) -> float:
    """Return the least peak of all picks and cuts that are allowed."""
    found = [math.inf]
    count = choices.piece_count
    for pick in all_picks(choices):
        for cut in itertools.combinations(range(1, count), choices.stages - 1):
            stages = [sum(piece >= start for start in cut) for piece in range(count)]
            found += [choices.peak(pick, stages)] * (choices.seconds(pick, stages) < math.inf)
    return min(found)


def checked(choices: StepProblem, found: MinMemory | None) -> None:
    """Check that what was found is what trying everything finds, and what a search needs."""
    least = tried(choices)
    assert peak_lower_bound(choices) <= least * (1 + 1e-9)
    if found is None:
        assert least == math.inf
        return
    assert found.peak == pytest.approx(least, rel=1e-6)
    assert found.bound <= least * (1 + 1e-9)
    assert solve(replace(choices, room=found.peak)) is not None
    assert solve(replace(choices, room=found.peak * 0.999)) is None
    assert largest_part(choices, found)


def test_the_least_without_stages_is_that_of_all_picks() -> None:
    random = Random(0)
    for _ in range(100):
        choices = choices_together(random)
        checked(choices, minimize_peak(choices))


@pytest.mark.parametrize("make", [random_choices, repeated_choices, uneven_choices])
def test_the_least_in_stages_is_that_of_all_picks_and_cuts(make) -> None:
    random = Random(1)
    for _ in range(40):
        choices = make(random)
        checked(choices, minimize_peak(choices))


def test_the_least_in_stages_is_the_same_by_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(min_memory, "reduce_problem", lambda _: None)
    random = Random(2)
    for _ in range(20):
        choices = random_choices(random)
        checked(choices, minimize_peak(choices))


def test_the_least_of_a_space_is_that_of_all_its_choices() -> None:
    random = Random(3)
    for _ in range(20):
        space = [choices_together(random), random_choices(random), uneven_choices(random)]
        found, least = find_min_memory(space, 60.0), min(map(tried, space))
        if least < math.inf:
            assert found.is_proved
            assert found.least is not None
            assert found.least.peak == pytest.approx(least, rel=1e-6)
            assert tried(space[found.index]) == pytest.approx(least, rel=1e-6)


def test_what_was_not_found_in_time_is_bounded() -> None:
    space = [random_choices(Random(4)) for _ in range(2)]
    found = find_min_memory(space, 0.0)
    assert found.least is None
    assert not found.is_proved
    assert 0 < found.bound <= min(map(tried, space))


def perceptron(*limits: str, memory: float, cluster: str = "h100x2", rows: int = 65536):
    model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024), nn.ReLU(), nn.Linear(1024, 10))
    sample, target = torch.empty(rows, 1024, device="meta"), torch.empty(rows, dtype=torch.long, device="meta")
    return px.auto_parallel(
        model.to("meta"), (sample, target), nn.functional.cross_entropy, cluster=cluster, optimizer="sgd",
        limits=limits, memory=memory,
    )  # fmt: skip


@pytest.mark.parametrize("limits", [("pp=1",), ("pp=1", "zero=3"), ("pp=2",), ("dp=1",), ()])
def test_the_least_that_an_error_names_is_enough_and_less_is_not(limits: tuple[str, ...]) -> None:
    with pytest.raises(PlanError, match=r"every one needs .* a rank or more \(.*: \d+ bytes\), most of it") as error:
        perceptron(*limits, memory=2**20)
    least = int(re.findall(r"(\d+) bytes", str(error.value))[0])
    assert perceptron(*limits, memory=least).memory <= least
    with pytest.raises(PlanError, match=f"{least} bytes"):
        perceptron(*limits, memory=0.999 * least)


def test_an_error_tells_inputs_outputs_and_borders_from_parameters() -> None:
    """Of narrow layers and many rows, of which few are in flight and all have room at the borders."""

    def part_of(model: nn.Module, *limits: str, rows: int = 16384) -> str:
        sample = torch.zeros(rows, 16), torch.zeros(rows, 16)
        with pytest.raises(PlanError) as error:
            px.auto_parallel(
                model, sample, nn.functional.mse_loss, cluster=f"cpux{limits[0][-1]}", optimizer="sgd", limits=limits,
                memory=2**10,
            )  # fmt: skip
        return re.findall("most of it (.*), and there are", str(error.value))[0]

    def blocks(count: int) -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(count)))

    inputs = "inputs and outputs of the model and its stages"
    assert part_of(blocks(4), "pp=4", "micro=64", "schedule=1f1b", "recompute=full") == inputs
    assert part_of(nn.Linear(16, 16), "pp=1", "dp=1") == inputs  # the batch and what is returned
    assert part_of(blocks(4), "pp=1", "dp=1", "recompute=none") == "activations"
    wide = nn.Sequential(nn.Linear(16, 65536), nn.Linear(65536, 16))
    assert part_of(wide, "pp=2", "micro=1", rows=4) == "parameters, gradients and optimizer state"


def test_the_least_is_of_a_plan_that_the_models_code_runs() -> None:
    """Of code that names its heads, which a rank with some of them does not run."""
    sample, target = torch.zeros(64, 16, 64), torch.zeros(64)

    def planned(memory: float) -> PlanResult:
        return px.auto_parallel(
            FixedHeads(), (sample, target), nn.functional.mse_loss, cluster="a100x2", limits=["tp=2"], memory=memory
        )

    with pytest.raises(PlanError, match="every one needs") as error:
        planned(1)
    least = int(re.findall(r"(\d+) bytes", str(error.value))[0])
    assert planned(least).memory <= least
    with pytest.raises(PlanError, match=f"{least} bytes"):
        planned(0.999 * least)
