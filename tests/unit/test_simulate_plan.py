"""Candidates of the planner event by event: as long and as full as the planner says, and with layers to look at."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phalanx as px
from phalanx.auto.planner.result import PlanResult
from phalanx.auto.simulate.picture import draw_step
from phalanx.auto.simulate.trace import build_trace
from phalanx.auto.simulate.values import Simulation
from phalanx.auto.simulate_plan import simulate_plan
from phalanx.errors import PlanError
from phalanx.plan.value import Average, Axis, ModuleRule, ParamRule, Plan, Step


class Deep(nn.Sequential):
    """Eight equal blocks, so that stages can be equal too."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 128)) for _ in range(8)))


SAMPLE = torch.zeros(256, 128), torch.zeros(256, dtype=torch.long)


def planned(cluster: str, *limits: str, top_k: int = 3) -> PlanResult:
    return px.auto_parallel(Deep(), SAMPLE, F.cross_entropy, cluster=cluster, limits=limits, top_k=top_k)


@pytest.mark.parametrize(
    "limits", [("tp=1",), ("tp=2", "pp=1"), ("tp=2", "pp=2", "schedule=zero_bubble"), ("zero=3",), ("pp=2", "vpp=2")]
)
def test_a_plan_is_simulated_as_the_candidate_that_it_was_built_from(limits: tuple[str, ...]) -> None:
    answer = planned("a100x4", *limits)
    for place, plan in enumerate(answer.top_k):
        assert simulate_plan(plan, Deep(), SAMPLE, F.cross_entropy, cluster="a100x4") == answer.simulate(place)


def test_a_plan_edited_by_hand_is_simulated_as_it_is() -> None:
    plan = planned("a100x4", "pp=4", "micro=4", "schedule=1f1b", "recompute=none").plan

    def simulated(edited: Plan) -> Simulation:
        return simulate_plan(edited, Deep(), SAMPLE, F.cross_entropy, cluster="a100x4").simulation

    edited = plan.model_copy(update={"schedule": plan.schedule.model_copy(update={"microbatches": 8})})
    assert simulated(edited).pipeline.schedule.microbatches == 8
    assert simulated(edited).idle_share < simulated(plan).idle_share
    again = tuple(ModuleRule(match=str(number), recompute="full") for number in range(8))
    edited = plan.model_copy(update={"modules": (*plan.modules, *again)})
    assert simulated(edited).step_time_s > simulated(plan).step_time_s


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"params": (ParamRule(match="*", update=Average(every=4)),)}, r"params\[\*\]\.update = average"),
        ({"mesh": (Axis(name="context", size=4),), "step": Step()}, "mesh axis 'context'"),
        ({"modules": (ModuleRule(match="0", recompute="full"),)}, r"modules\.recompute"),
        ({"modules": (ModuleRule(match="0.0", style="context"),)}, r"modules\[0\.0\]"),
    ],
)
def test_what_has_no_price_is_named(changed: dict[str, object], what: str) -> None:
    plan = planned("a100x4", "dp=4", "zero=0").plan.model_copy(update=changed)
    with pytest.raises(PlanError, match=f"no price for {what}"):
        simulate_plan(plan, Deep(), SAMPLE, F.cross_entropy, cluster="a100x4")


def test_a_plan_is_simulated_on_as_many_devices_as_it_has_ranks() -> None:
    plan = planned("a100x4", "dp=4", "zero=0").plan
    with pytest.raises(PlanError, match=r"for 4 ranks, and the cluster .* has 2 devices"):
        simulate_plan(plan, Deep(), SAMPLE, F.cross_entropy, cluster="a100x2")


@pytest.mark.parametrize(
    ("cluster", "limits", "apart"),
    [
        ("a100x4", ("pp=1",), 1e-9),
        ("cpux4", ("pp=1",), 1e-9),
        ("cpux4", ("pp=1", "zero=3"), 0.01),  # gradients travel beside the gather of their own layer, not after it
        ("a100x4", ("tp=2", "pp=1"), 0.01),
        ("cpux4", ("dp=1", "tp=1", "vpp=1"), 0.05),  # on the way to the last stage each send counts once, not twice
        ("cpux4", ("pp=2", "vpp=1"), 0.05),
    ],
)
def test_a_plan_takes_as_long_event_by_event_as_the_planner_says(
    cluster: str, limits: tuple[str, ...], apart: float
) -> None:
    answer = planned(cluster, *limits)
    for place, candidate in enumerate(answer.search.top_k):
        step = answer.simulate(place).simulation
        assert step.step_time_s == pytest.approx(candidate.step_time_s, rel=apart), candidate.config
        assert max(step.peaks) == pytest.approx(candidate.memory_bytes, rel=1e-9), candidate.config


def test_interleaved_stages_are_never_faster_than_the_work_of_a_rank() -> None:
    answer = planned("cpux2", "pp=2", "vpp=2")
    for place, candidate in enumerate(answer.search.top_k):
        step = answer.simulate(place).simulation
        assert max(one.busy for one in step.ranks) <= step.step_time_s
        assert step.step_time_s == pytest.approx(candidate.step_time_s, rel=0.02)  # sends aside: stages are even
        assert max(step.peaks) <= candidate.memory_bytes * (1 + 1e-9)


def test_a_trace_names_the_layers_and_follows_their_memory() -> None:
    answer = planned("cpux2", "tp=2")
    trace = build_trace(answer.simulate())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {"forward 0.0", "backward 7.2", "optimizer"} <= {event["name"] for event in spans}
    assert any(event["cat"] == "collectives" for event in spans)
    held = [event["args"]["GiB"] for event in trace["traceEvents"] if event["ph"] == "C"]
    assert len(set(held)) > 6
    assert trace["otherData"]["rows_per_s"] == pytest.approx(256 / answer.seconds)
    assert trace["otherData"]["ranks_that_do_the_same"] == 2
    json.dumps(trace)


@pytest.mark.parametrize(("limit", "words"), [("pp=1", "each rank"), ("pp=2", "stage 1")])
def test_a_picture_shows_layers_or_stages(limit: str, words: str) -> None:
    said = [one.text for one in ET.fromstring(draw_step(planned("a100x2", limit).simulate())).iter()]
    assert words in said
    assert any("samples/s" in one for one in said if one)
