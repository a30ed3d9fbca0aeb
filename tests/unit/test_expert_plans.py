"""Experts are known by how they are called, priced by the tokens that routers send them, and dealt where that pays."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as px
from expert_models import Experts, Mixture
from phalanx.auto.capture.layers import EXPERTS, WHOLE
from phalanx.auto.capture.step import capture
from phalanx.auto.planner.report.result import PlanResult
from phalanx.auto.planner.strategies import build_problem
from phalanx.auto.simulate_plan import simulate_plan
from phalanx.errors import ConfigError, PlanError
from phalanx.parallel.model_shape import shape_of
from phalanx.parallel.tensor.shard_api import with_shard_requests
from phalanx.parallel.tensor.styles import check_styles
from phalanx.plan.rules.rules import plan_from_strategy
from phalanx.plan.value import OnRanks, Shard
from unit.test_auto_parallel import every_plan

WIDTH, INNER, COUNT = 64, 512, 4
SLOW = "a100x1,nodes=4,gbps=1"
PAIRS = "a100x2,nodes=2,gbps=1"
"""Fast links between two ranks, slow ones to the other two."""


class Gated(Experts):
    """Experts with a module inside, which has no parameters."""

    def __init__(self) -> None:
        super().__init__(COUNT, WIDTH, INNER)
        self.act = nn.SiLU()

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(self.act(tokens), chosen, weights)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Mixture(COUNT, 2, (), WIDTH, INNER), nn.Linear(WIDTH, 10))


def batch(rows: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(rows, WIDTH), torch.zeros(rows, dtype=torch.long)


@cache
def planned(
    cluster: str, rows: int, *limits: str, memory: float | None = None, optimizer: str = "momentum"
) -> PlanResult:
    return px.auto_parallel(
        net(), batch(rows), F.cross_entropy, cluster=cluster, optimizer=optimizer, limits=limits, memory=memory
    )


def test_experts_are_one_operator_with_the_work_of_the_tokens_that_were_chosen_for_them() -> None:
    step = capture(net(), batch(32), F.cross_entropy)
    (forward,) = (op for op in step.operators if op.experts is not None)
    assert (step.level, step.reasons) == ("graph", ())
    assert forward.module == "1.experts"
    assert forward.experts is not None
    assert (forward.experts.experts, forward.experts.copies, forward.experts.token_bytes) == (COUNT, 64, 4 * WIDTH)
    assert forward.flops == forward.experts.flops == 2 * 64 * 2 * WIDTH * INNER
    backward = sum(op.flops for op in step.operators if op.module == "1.experts" and op.phase == "backward")
    assert backward == 2 * forward.flops
    assert 0 < forward.saved_bytes < 64 * 4 * (3 * WIDTH + 4 * INNER)


def test_what_experts_call_inside_is_theirs() -> None:
    model = net()
    model[1].experts = Gated()
    step = capture(model, batch(32), F.cross_entropy)
    assert step.level == "graph"
    assert {op.module for op in step.operators if op.module.startswith("1.experts")} == {"1.experts"}


@pytest.mark.parametrize("called", ["without weights", "with tokens of three dims"])
def test_what_is_called_otherwise_is_no_call_of_experts(called: str) -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(COUNT, WIDTH, WIDTH))

        def forward(self, tokens: Tensor, *others: Tensor) -> Tensor:
            return tokens @ self.weight[0]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.other, self.conv = Other(), nn.Conv1d(1, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            chosen = torch.zeros(len(x), 2, dtype=torch.long)
            x = self.conv(x[:, None])[:, 0, :1] * x
            others = (chosen,) if called == "without weights" else (chosen, chosen.double())
            return self.other(x if called == "without weights" else x[None], *others)

    step = capture(Model(), batch(8)[0])
    assert all(op.experts is None for op in step.operators)
    assert "aten.convolution.default" in {op.name for op in step.operators}


@pytest.mark.parametrize(
    ("cluster", "rows", "limits"),
    [
        (SLOW, 32, ("tp=1", "pp=1")),
        (SLOW, 8192, ("tp=1", "pp=1")),
        (PAIRS, 64, ("zero=0", "pp=1")),
    ],
)
def test_the_search_finds_what_trying_every_plan_finds(cluster: str, rows: int, limits: tuple[str, ...]) -> None:
    answer = planned(cluster, rows, *limits)
    assert {1, 2, 4} <= {config.experts for config in answer.search.configs}
    tried = every_plan(answer)
    assert len(tried) > 20
    assert answer.seconds == pytest.approx(min(seconds for seconds, peak in tried if peak <= answer.room), rel=1e-7)
    assert answer.gap == 0
    least = min(peak for _, peak in tried)
    tight = planned(cluster, rows, *limits, memory=(least + answer.memory) / 2)
    fitting = [seconds for seconds, peak in every_plan(tight) if peak <= tight.room]
    assert tight.seconds == pytest.approx(min(fitting), rel=1e-7)


def test_experts_are_dealt_where_their_gradients_cost_more_than_their_tokens_and_not_elsewhere() -> None:
    few, many = planned(SLOW, 32, "tp=1", "pp=1"), planned(SLOW, 8192, "tp=1", "pp=1")
    assert few.search.best.strategies["1.experts"] == EXPERTS
    assert few.search.best.config.experts == 4
    assert "1.experts" not in many.search.best.strategies
    assert many.search.best.config.experts == 1
    assert few.seconds < planned(SLOW, 32, "tp=1", "pp=1", "ep=1").seconds
    assert many.seconds < planned(SLOW, 8192, "tp=1", "pp=1", "ep>=2").seconds


def test_experts_are_dealt_where_copies_do_not_fit() -> None:
    def answer(*limits: str, memory: float | None = None) -> PlanResult:
        return planned(SLOW, 6400, "tp=1", "pp=1", "zero=0", *limits, memory=memory, optimizer="adam")

    copies, pairs, all_four = answer(), answer("ep=2"), answer("ep=4")
    assert copies.search.best.config.experts == 1
    assert all_four.memory < pairs.memory < copies.memory
    tight = answer(memory=copies.memory - 1)
    assert tight.search.best.config.experts > 1
    assert tight.seconds == pytest.approx(min(pairs.seconds, all_four.seconds))
    least = math.ceil(all_four.memory)
    with pytest.raises(PlanError, match=rf"every one needs .* or more \(data=4 experts=4 .*: {least} bytes"):
        answer(memory=all_four.memory - 1)


def test_of_mixtures_with_other_numbers_of_experts_those_are_dealt_that_divide() -> None:
    def answer(*limits: str) -> PlanResult:
        mixtures = Mixture(COUNT, 2, (), WIDTH, INNER), Mixture(6, 2, (), WIDTH, INNER)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *mixtures, nn.Linear(WIDTH, 10))
        return px.auto_parallel(model, batch(32), F.cross_entropy, cluster=SLOW, limits=("tp=1", "pp=1", *limits))

    best = answer()
    assert best.space["experts"] == (1, 2, 4)
    assert best.seconds == pytest.approx(min(seconds for seconds, _ in every_plan(best)), rel=1e-7)
    assert [path for path, way in answer("ep=4").search.best.strategies.items() if way == EXPERTS] == ["1.experts"]
    assert len([way for way in answer("ep=2").search.best.strategies.values() if way == EXPERTS]) == 2


def test_a_rank_holds_its_part_of_the_experts_and_of_what_is_kept_for_them() -> None:
    answer = planned(SLOW, 32, "ep=4")
    config = answer.search.best.config
    (node,) = (
        node
        for node in build_problem(answer.work, config, answer.catalog.of(config)).problem.nodes
        if node.name.endswith("1.experts")
    )
    whole, dealt = node.options
    assert (whole.label, dealt.label) == (str(WHOLE), str(EXPERTS))
    assert dealt.persistent_bytes == pytest.approx(whole.persistent_bytes / 4)
    assert dealt.update_s < whole.update_s
    assert (whole.comm_s, dealt.grad_sync_s) == (0.0, 0.0)
    assert dealt.comm_s > 0


@pytest.mark.parametrize(("experts", "in_buckets"), [(2, True), (4, False)])
def test_gradients_of_experts_with_copies_are_in_buckets(experts: int, in_buckets: bool) -> None:
    answer = planned(SLOW, 32, f"ep={experts}", "zero=0", "tp=1", "pp=1")
    config = answer.search.best.config
    nodes = build_problem(answer.work, config, answer.catalog.of(config)).problem.nodes
    dealt = next(node.options[1] for node in nodes if node.name.endswith("1.experts"))
    gradients = sum(param.count for param in shape_of(net()[1].experts).params) * 4 / experts
    assert dealt.late_bytes == (0.0 if in_buckets else gradients)


def test_ranks_that_hold_experts_together_are_neighbours() -> None:
    answer = planned(PAIRS, 8192, "tp=1", "pp=1", "zero=0")
    config = next(config for config in answer.search.configs if config.experts == 2)
    assert (config.over_experts.ranks, config.over_experts.in_node) == (2, 2)
    assert (config.over_copies.ranks, config.over_copies.in_node) == (2, 1)
    assert (config.over_data.ranks, config.over_data.in_node) == (4, 2)
    assert answer.search.best.config.experts == 2


@pytest.mark.parametrize("limits", [("ep=2",), ("ep=4",), ("ep=2", "tp=2"), ("ep=2", "recompute=none")])
def test_the_plan_is_one_that_a_person_could_write_and_is_simulated_as_it_was_planned(limits: tuple[str, ...]) -> None:
    answer = planned(SLOW, 64, *limits)
    model = net()
    for place, plan in enumerate(answer.top_k):
        check_styles(plan, model)
        assert simulate_plan(plan, model, batch(64), F.cross_entropy, cluster=SLOW, optimizer="momentum") == (
            answer.simulate(place)
        )
    plan = answer.plan
    assert [(rule.match, rule.style) for rule in plan.modules if rule.style == "expert"] == [("1.experts", "expert")]
    assert plan.axis_size("expert") == int(limits[0][-1])
    assert plan.rule_for("1.experts.bias").place == OnRanks(layout={"expert": Shard(dim=0)})
    assert "expert" in plan.step.batch_axes


def test_a_plan_of_px_shard_is_priced_too() -> None:
    def simulated(axis: str | None) -> Any:
        model = px.shard(net(), {"1.experts": "expert"}, axis=axis)
        plan = with_shard_requests(plan_from_strategy(px.DistributedStrategy(), shape_of(model), 4), model)
        step = simulate_plan(plan, net(), batch(64), F.cross_entropy, cluster=SLOW, optimizer="momentum")
        return step.simulation

    assert simulated(None) == simulated("data") == planned(SLOW, 64, "tp=1", "ep=4").simulate().simulation


def test_the_busiest_rank_decides_where_routers_prefer_some_experts() -> None:
    answer = planned(SLOW, 64, "ep=4", "tp=1")
    seconds = [answer.seconds_at(load) for load in (1, 2, 4)]
    assert seconds == sorted(seconds)
    assert seconds[0] == pytest.approx(answer.seconds)
    assert answer.skewed_s == answer.to_json()["skewed_step_time_s"] == seconds[-1] > answer.seconds
    assert "assumes that routers send as many tokens to each of 4 ranks" in " ".join(str(answer).split())
    assert planned(SLOW, 64, "ep=1").skewed_s is None
    with pytest.raises(ConfigError, match=r"asked for a load of 5, and 4 ranks hold the experts together"):
        answer.seconds_at(5)


def test_what_is_not_searched_is_said() -> None:
    answer = planned(SLOW, 64)
    assert any(why.startswith("experts dealt to ranks together with sharding or stages") for why in answer.left_out)
    assert all(config.zero == 0 and config.stages == 1 for config in answer.search.configs if config.experts > 1)
    assert answer.space["experts"] == (1, 2, 4)
    plain = px.auto_parallel(nn.Linear(8, 8), torch.zeros(8, 8), cluster="a100x2")
    assert "experts" not in plain.space
    assert not any("experts" in why for why in plain.left_out)
    with pytest.raises(PlanError, match=r"not searched: experts dealt to ranks, as the model calls no module"):
        px.auto_parallel(nn.Linear(8, 8), torch.zeros(8, 8), cluster="a100x2", limits=("ep=2",))
    with pytest.raises(PlanError, match=r"'0' is a Linear, and 'expert' is a style of a module whose parameters"):
        planned(SLOW, 64, "0=expert")
    assert planned(SLOW, 64, "1.experts=expert").search.best.config.experts > 1
    assert planned(SLOW, 32, "1.experts=whole").search.best.config.experts == 1


def test_a_plan_of_a_person_that_does_not_train_has_no_price() -> None:
    plan = planned(SLOW, 64, "ep=2", "tp=1").plan
    layout = OnRanks(layout={"data": Shard(dim=0)})
    wrong = tuple(
        rule.model_copy(update={"place": layout}) if rule.match == "1.experts.up" else rule for rule in plan.params
    )
    with pytest.raises(PlanError, match=r"no price for style 'expert' along mesh axes data, expert"):
        simulate_plan(plan.model_copy(update={"params": wrong}), net(), batch(64), F.cross_entropy, cluster=SLOW)


def test_zero_bubble_is_not_for_experts_which_use_a_parameter_one_by_one() -> None:
    answer = planned(SLOW, 64)
    assert "zero bubble, as parameter '1.experts.up' is used more than once" in answer.left_out
