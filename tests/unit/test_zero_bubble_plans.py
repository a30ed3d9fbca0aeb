"""Plans whose stages compute gradients of weights apart: where they are searched, what they cost, what they say."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input
from torch.profiler import ProfilerActivity, profile

import phalanx as px
from phalanx.auto.planner.planner import list_configs
from phalanx.auto.planner.report.result import PlanResult
from phalanx.auto.planner.strategies import build_problem
from phalanx.auto.search.request import PLAN_KNOBS, read_limit
from phalanx.cluster.spec.cluster import read_cluster
from phalanx.errors import ConfigError, PlanError
from phalanx.parallel.model_shape import shape_of
from phalanx.parallel.validate import _first_beyond_this_version
from phalanx.strategy import DistributedStrategy
from unit.test_auto_parallel import every_plan

ROWS, WIDTH = 4096, 512
SLOW_CARDS = {
    "nodes": [{"device": "slow", "devices": 2}],
    "devices": [{"name": "slow", "like": "A100-80GB-SXM", "tflops": {"fp32": 0.05}, "link_gb_s": 2}],
}
"""So slow that passes, and not the host, decide."""


class Chain(nn.Sequential):
    """Blocks as large as each other, so that stages can be even."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__(
            *(nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(blocks))
        )


def plan_of(model: nn.Module, *limits: str, cluster: object = None, **settings: object) -> PlanResult:
    return px.auto_parallel(
        model, (torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)), F.mse_loss,
        cluster=read_cluster(cluster or SLOW_CARDS), optimizer="sgd", limits=limits, **settings,
    )  # fmt: skip


@cache
def planned(*limits: str) -> PlanResult:
    return plan_of(Chain(), *limits)


def test_only_arrangements_that_can_run_take_backward_passes_apart():
    every = list(list_configs(8, has_blocks=True, max_stages=8, batch_size=32))
    apart = [at for at in every if at.zero_bubble]
    assert {at.stages for at in apart} == {2, 4, 8}
    assert {(at.zero, at.recompute, at.virtual, at.micro_batches % at.stages) for at in apart} == {(0, "none", 1, 0)}
    assert len(set(every)) == len(every)
    assert not any(
        at.zero_bubble for at in list_configs(8, has_blocks=True, max_stages=8, batch_size=32, may_split=False)
    )


@pytest.mark.parametrize("limits", [("pp=2",), ("pp=2", "schedule=zero_bubble")])
def test_the_search_finds_what_trying_every_plan_finds(limits):
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    answer = plan_of(model, *limits)
    assert answer.search.best.config.zero_bubble
    every = every_plan(answer)
    assert answer.seconds == pytest.approx(min(seconds for seconds, peak in every if peak <= answer.room), rel=1e-7)
    assert answer.gap == 0
    least = min(peak for _, peak in every)
    for share in (0.1, 0.5, 0.9):
        tight = plan_of(model, *limits, memory=least + share * (answer.memory - least) + 1)
        fitting = [seconds for seconds, peak in every if peak <= tight.room]
        assert tight.seconds == pytest.approx(min(fitting), rel=1e-7)
        assert tight.memory <= tight.room * (1 + 1e-9)


def test_gradients_of_weights_are_those_products_that_lead_to_nothing_else():
    answer = planned("pp=2", "schedule=zero_bubble", "tp=1")
    at, rates = answer.search.best.config, answer.work.machine.operators
    options = [node.options[0] for node in build_problem(answer.work, at, answer.catalog.of(at)).problem.nodes]
    rows = ROWS / at.batch_parts
    linear = [one for one, segment in zip(options, answer.layers.calls, strict=True) if segment.kind == "Linear"]
    # (outputs, rows) by (rows, inputs)
    expected = [rates.matmul_s(2 * WIDTH, WIDTH, rows), rates.matmul_s(WIDTH, 2 * WIDTH, rows)] * 4
    assert [one.weight_grad_s for one in linear] == pytest.approx(expected)
    assert sum(one.weight_grad_s for one in options) == pytest.approx(sum(expected))
    assert all(one.weight_grad_s < one.backward_s for one in linear[1:])
    assert linear[0].weight_grad_s == pytest.approx(linear[0].backward_s - 2 * answer.work.machine.host.selective_op_s)
    assert [one.deferred_bytes for one in linear[:2]] == [4 * rows * 2 * WIDTH, 4 * rows * WIDTH]


def test_what_waits_for_gradients_of_weights_is_what_torch_keeps():
    answer = planned("pp=2", "schedule=zero_bubble", "tp=1")
    at = answer.search.best.config
    rows = int(ROWS / at.batch_parts)
    block, taken = Chain(1), torch.ones(rows, WIDTH, requires_grad=True)
    given = block(taken)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        kept = stage_backward_input([given], [torch.ones(rows, WIDTH)], [taken], block.parameters())
    options = [node.options[0] for node in build_problem(answer.work, at, answer.catalog.of(at)).problem.nodes]
    of_block = sum(one.deferred_bytes for one in options) / len(answer.layers.captured.blocks[0])
    more = sum(event.self_cpu_memory_usage for event in seen.events())
    assert kept[1]
    assert more == pytest.approx(of_block + 4 * rows * WIDTH, rel=0.01)  # the gradient of the input is sent


def test_convolutions_have_half_of_their_backward_pass_left():
    convolutions = nn.Sequential(*(nn.Conv1d(8, 8, 3, padding=1) for _ in range(4)))
    answer = px.auto_parallel(
        convolutions, torch.zeros(64, 8, 64), cluster=read_cluster(SLOW_CARDS), limits=("schedule=zero_bubble",)
    )
    at, added = answer.search.best.config, 2 * answer.work.machine.host.selective_op_s
    nodes = build_problem(answer.work, at, answer.catalog.of(at)).problem.nodes
    whole = [node for node in nodes if node.options[0].weight_grad_s]
    assert len(whole) == 4
    first, second = whole[0].options[0], whole[1].options[0]
    assert first.weight_grad_s == pytest.approx(first.backward_s - added)
    assert second.weight_grad_s == pytest.approx((second.backward_s - added) / 2)


def test_a_plan_is_as_long_and_as_full_event_by_event_as_the_planner_says():
    answer = planned("pp=2", "schedule=zero_bubble")
    assert len(answer.search.top_k) > 1
    for place, candidate in enumerate(answer.search.top_k):
        simulated = answer.simulate(place)
        step = simulated.simulation
        assert step.pipeline.schedule.kind == "zero_bubble"
        assert step.step_time_s == pytest.approx(candidate.step_time_s, rel=0.05), candidate.config
        assert max(step.peaks) == pytest.approx(candidate.memory_bytes, rel=1e-9), candidate.config
        assert {"F", "I", "W"} <= {one.kind for one in step.slices}


def test_an_answer_says_which_schedule_it_is_and_why_not_another():
    answer = planned()
    assert answer.space["schedule"] == ("none", "1f1b", "zero_bubble", "interleaved")
    assert "zero bubble together with sharding, recomputation or parts" in str(answer.left_out)
    fixed = planned("pp=2", "schedule=zero_bubble")
    assert " zero_bubble " in fixed.to_json()["top_k"][0]["arrangement"]
    assert fixed.plan.schedule.kind == "zero_bubble"
    plain = planned("pp=2", "schedule=1f1b")
    assert plain.plan.schedule.kind == "1f1b"
    assert fixed.seconds < plain.seconds
    assert "With schedule=1f1b" in planned("pp=2").why_not("schedule=1f1b")
    assert {at.stages for at in planned("schedule=none").search.configs} == {1}
    assert {at.virtual for at in planned("schedule=interleaved").search.configs} == {2}
    model = Chain()
    assert _first_beyond_this_version(fixed.plan, shape_of(model), model) is None


def test_a_schedule_that_is_not_known_is_an_error():
    with pytest.raises(ConfigError, match=r"'schedule=zb'. Write schedule= and one of none, 1f1b, interleaved, zero_b"):
        planned("schedule=zb")
    with pytest.raises(ConfigError, match=r"'schedule<=1f1b'. Write schedule= and one of"):
        planned("schedule<=1f1b")


class Shared(Chain):
    """Uses a parameter twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + F.linear(x, self[0][0].weight[:WIDTH]))


def frozen_start() -> nn.Module:
    model = Chain()
    for param in model[0].parameters():
        param.requires_grad = False
    return model


@pytest.mark.parametrize(
    ("build", "settings", "why"),
    [
        (Chain, {"strategy": DistributedStrategy(graph=True)}, "the backward pass of a compiled stage is one piece"),
        (frozen_start, {}, "the model begins with frozen layers"),
        (Shared, {}, "parameter '0.0.weight' is used more than once"),
    ],
)
def test_why_backward_passes_are_not_taken_apart(build, settings, why):
    answer = plan_of(build(), "pp=2", **settings)
    assert not any(at.zero_bubble for at in answer.search.configs)
    assert f"zero bubble, as {why}" in answer.left_out
    said = answer.why_not("schedule=zero_bubble")
    assert f"keeps to the limits 'pp=2', 'schedule=zero_bubble' (not searched: zero bubble, as {why})" in said


class Tied(nn.Sequential):
    """Begins and ends with the same parameter."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(WIDTH, 8), nn.Linear(8, 8), nn.Linear(8, WIDTH, bias=False))
        self[2].weight = self[0].weight


def test_a_model_of_one_piece_says_why_it_has_no_stages():
    with pytest.raises(PlanError, match=r"\(not searched: pipelines, as all of it belongs together: .*share param"):
        px.auto_parallel(
            Tied(), torch.zeros(8, 4, dtype=torch.long), cluster="a100x2", limits=("schedule=zero_bubble",)
        )
    assert "pipelines, as all of it" in str(px.auto_parallel(Tied(), torch.zeros(8, 4).long(), cluster="a100x2"))


def test_the_schedule_of_a_described_run_is_no_limit():
    with pytest.raises(ConfigError, match=r"Write schedule= and one of none, 1f1b, interleaved, zero_bubble"):
        read_limit("schedule=zero-bubble", PLAN_KNOBS)
