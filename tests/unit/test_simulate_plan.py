"""Candidates of the planner event by event: as long and as full as the planner says, and with layers to look at."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phalanx as px
from phalanx.auto.captured_model import build_machine
from phalanx.auto.cost.collectives import GroupTopology
from phalanx.auto.cost.machine_model import MachineModel
from phalanx.auto.planner.report.result import PlanResult
from phalanx.auto.simulate.picture import draw_step
from phalanx.auto.simulate.trace import build_trace
from phalanx.auto.simulate.values import Simulation
from phalanx.auto.simulate_plan import simulate_plan
from phalanx.cluster.spec.cluster import read_cluster
from phalanx.errors import PlanError
from phalanx.plan.value import Average, Axis, ModuleRule, ParamRule, Plan, Push, Schedule, Step, TopK, Update


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
        ({"params": (ParamRule(match="*", update=Push(mode="sync")),)}, r"params\[\*\]\.update = push"),
        ({"params": (ParamRule(match="*", update=Average(every=4, adaptive=True)),)}, "params.* that is adaptive"),
        (
            {"params": (ParamRule(match="*"), ParamRule(match="0.*", update=Average(every=4)))},
            r"params\.update of several kinds \(all_reduce, average\)",
        ),
        ({"mesh": (Axis(name="context", size=4),), "step": Step()}, "mesh axis 'context'"),
        (
            {"modules": (ModuleRule(match="0", recompute="full"), ModuleRule(match="1", recompute="selective"))},
            r"modules\.recompute of several kinds \(full, selective\)",
        ),
        ({"modules": (ModuleRule(match="0.0", style="context"),)}, r"modules\[0\.0\]"),
    ],
)
def test_what_has_no_price_is_named(changed: dict[str, object], what: str) -> None:
    plan = planned("a100x4", "dp=4", "zero=0").plan.model_copy(update=changed)
    with pytest.raises(PlanError, match=f"no price for {what}"):
        simulate_plan(plan, Deep(), SAMPLE, F.cross_entropy, cluster="a100x4")


def test_micro_batches_that_all_go_forward_first_are_all_held() -> None:
    plan = planned("a100x4", "pp=4", "micro=8", "schedule=1f1b", "recompute=none", "tp=1").plan
    edited = plan.model_copy(update={"schedule": Schedule(kind="gpipe", microbatches=8)})
    step, usual = (simulate_plan(one, Deep(), SAMPLE, F.cross_entropy, cluster="a100x4") for one in (edited, plan))
    assert "gpipe" in step.name
    pipeline = step.simulation.pipeline
    assert pipeline.schedule.kind == "gpipe"
    assert pipeline.stages == usual.simulation.pipeline.stages
    held = [
        size + 8 * stage.activation_bytes + stage.workspace_bytes
        for size, stage in zip(pipeline.persistent_bytes, pipeline.stages, strict=True)
    ]
    assert step.simulation.peaks == pytest.approx(held)
    in_update = pipeline.persistent_bytes[-1] + pipeline.update_bytes[-1]  # which takes more than one micro-batch
    assert in_update > held[-1] - 7 * pipeline.stages[-1].activation_bytes
    assert usual.simulation.peaks[-1] == pytest.approx(in_update)


def test_modules_that_a_plan_recomputes_are_computed_twice_and_no_others() -> None:
    plan = planned("a100x1", "recompute=none").plan

    def simulated(*names: str) -> Simulation:
        rules = tuple(ModuleRule(match=name, recompute="full") for name in names)
        edited = plan.model_copy(update={"modules": (*plan.modules, *rules)})
        return simulate_plan(edited, Deep(), SAMPLE, F.cross_entropy, cluster="a100x1").simulation

    none, first, two, every = simulated(), simulated("3"), simulated("3", "5"), simulated("*")
    forward = sum(none.pipeline.stages[layer].forward.compute for layer in (9, 10, 11))  # of 3.0, 3.1 and 3.2
    again = forward + machine("a100x1").host.checkpoint_s
    assert first.step_time_s == pytest.approx(none.step_time_s + again)
    assert two.step_time_s == pytest.approx(none.step_time_s + 2 * again)
    assert every.step_time_s == pytest.approx(none.step_time_s + 8 * again)
    # Of its activations, block 3 keeps its input alone: 256 rows of 128 in float32.
    assert [stage.activation_bytes for stage in first.pipeline.stages[9:12]] == [256 * 128 * 4, 0, 0]
    other = [stage.activation_bytes for layer, stage in enumerate(first.pipeline.stages) if layer // 3 != 3]
    assert other == [stage.activation_bytes for layer, stage in enumerate(none.pipeline.stages) if layer // 3 != 3]


def machine(cluster: str) -> MachineModel:
    return build_machine(read_cluster(cluster).weakest(), "fp32")


def updated(update: Update) -> Simulation:
    """Return a step of four ranks that train with it."""
    plan = planned("a100x4", "dp=4", "zero=0", "recompute=none").plan
    edited = plan.model_copy(update={"params": (ParamRule(match="*", update=update),), "modules": ()})
    return simulate_plan(edited, Deep(), SAMPLE, F.cross_entropy, cluster="a100x4").simulation


ENTRIES = [*[1024 * 128, 1024, 128 * 1024, 128] * 8]
"""Of the parameters of `Deep`."""


def test_ranks_that_average_parameters_every_so_many_steps_take_that_part_of_the_collective() -> None:
    average_s = machine("a100x4").collective_s("all_reduce", 4.0 * sum(ENTRIES), GroupTopology(4, 4))
    apart = updated(Average(every=10**9)).step_time_s
    assert updated(Average(every=4)).step_time_s == pytest.approx(apart + average_s / 4)
    assert updated(Average(every=1)).step_time_s == pytest.approx(apart + average_s)


def test_the_largest_entries_of_gradients_travel_alone() -> None:
    collective_s, where = machine("a100x4").collective_s, GroupTopology(4, 4)
    sent = sum(round(count * 0.01) for count in ENTRIES if count >= 16384)
    small = sum(count for count in ENTRIES if count < 16384)
    late = collective_s("all_reduce", 4.0 * small, where)
    late += collective_s("all_gather", 4 * 4.0 * sent, where) + collective_s("all_gather", 4 * 8.0 * sent, where)
    apart, step = updated(Average(every=10**9)), updated(TopK(sparsity=(0.75, 0.99)))
    assert step.step_time_s == pytest.approx(apart.step_time_s + late)
    residual = 4 * sum(count for count in ENTRIES if count >= 16384)
    gradients = 4 * sum(ENTRIES)  # all through the step; those that nothing puts together come with the backward pass
    assert step.pipeline.persistent_bytes[0] == pytest.approx(apart.pipeline.persistent_bytes[0] + gradients + residual)


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
