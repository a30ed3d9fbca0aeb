"""Style expert: px.shard writes the rules a person would write; what cannot train is refused with words that help."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import phalanx as px
from expert_models import Experts, Mixture, mixture
from phalanx.errors import ConfigError, PhalanxError, PlanError
from phalanx.parallel.model_shape import shape_of
from phalanx.parallel.replicas.exactness import why_inexact
from phalanx.parallel.tensor.expert_modules import holds_experts
from phalanx.parallel.tensor.shard_api import with_shard_requests
from phalanx.parallel.tensor.styles import check_styles
from phalanx.plan import explain
from phalanx.plan.buckets import all_reduce_buckets
from phalanx.plan.rules.collective_pass import why_collective
from phalanx.plan.rules.rules import plan_from_strategy
from phalanx.plan.value import Axis, ModuleRule, OnRanks, ParamRule, Plan, ReduceScatter, Shard, Step
from phalanx.strategy import DistributedStrategy

STYLES = {"*.experts": "expert"}


def plan_of(model: nn.Module, world_size: int = 4, **settings: object) -> Plan:
    return with_shard_requests(plan_from_strategy(DistributedStrategy(**settings), shape_of(model), world_size), model)


def axes(plan: Plan) -> dict[str, int]:
    return {axis.name: axis.size for axis in plan.mesh}


def test_experts_are_dealt_to_the_ranks_that_read_rows_of_their_own():
    plan = plan_of(px.shard(mixture(), STYLES))
    assert axes(plan) == {"data": 1, "expert": 4}
    assert plan.step.batch_axes == ("data", "expert")
    assert [(rule.match, rule.style) for rule in plan.modules] == [("1.experts", "expert"), ("3.experts", "expert")]
    assert plan.rule_for("1.experts.bias").place == OnRanks(layout={"expert": Shard(dim=0)})
    assert plan.rule_for("1.router.weight") == plan.params[0]
    assert "tokens travel to theirs" in plan.because[-1].effect
    assert why_collective(plan) == "its ranks exchange rows or tokens"
    assert axes(plan_of(px.shard(mixture(), STYLES, size=2))) == {"data": 2, "expert": 2}


@pytest.mark.parametrize(
    "settings",
    [{"hybrid_configs": {"ep_degree": 2}}, {"expert_parallel": True, "expert_parallel_configs": {"degree": 2}}],
)
def test_a_strategy_gives_the_degree(settings):
    assert axes(plan_of(px.shard(mixture(), STYLES), **settings)) == {"data": 2, "expert": 2}
    with pytest.raises(PlanError, match=r"asks for 2 ranks that hold the experts .* no module of this model has any"):
        plan_of(mixture(), **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sharding": True}, r"to the ranks of axis 'data', and the mesh \(shard=4\) leaves one. Turn sharding"),
        ({"hybrid_configs": {"pp_degree": 4}}, r"the mesh \(stage=4\) leaves one"),
    ],
)
def test_ranks_that_other_techniques_have_taken_hold_no_experts(settings, message):
    with pytest.raises(PlanError, match=message):
        plan_of(px.shard(mixture(), STYLES), **settings)


@pytest.mark.parametrize("other", ["sharding", "pipeline", "dgc", "localsgd", "a_sync"])
def test_techniques_that_do_not_go_with_experts_are_refused(other):
    with pytest.raises(PhalanxError, match=f"{other}|expert_parallel"):
        DistributedStrategy(**{other: True, "expert_parallel": True, "expert_parallel_configs": {"degree": 2}})


def test_gradients_of_experts_are_added_up_over_the_ranks_that_hold_the_same():
    model = px.shard(mixture(), STYLES, size=2)
    buckets = all_reduce_buckets(plan_of(model), shape_of(model))
    along = {name: (bucket.axes, bucket.is_weighted) for bucket in buckets for name in bucket.names}
    assert along["1.experts.up"] == (("data",), True)
    assert along["1.router.weight"] == (("data", "expert"), False)


def test_the_plan_survives_json_and_says_what_a_rank_holds():
    model = px.shard(mixture(), STYLES, size=2)
    plan = plan_of(model)
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    check_styles(plan, model)
    row = next(row for row in explain(plan, shape_of(model)).rows if row.match == "1.experts.up")
    assert (row.bytes, row.rank_bytes, row.location) == (480, 240, "cut over expert=2 by its layer")
    assert "all-reduce" in row.update


def test_stacked_parameters_are_experts_and_layers_of_torch_are_not():
    mixed = Experts(4)
    mixed.head = nn.Linear(2, 2)
    assert holds_experts(Experts(4))
    assert not any(map(holds_experts, (mixed, nn.Linear(4, 4), nn.LayerNorm(4), nn.ModuleList([nn.Linear(4, 4)]))))


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))


def test_experts_in_a_list_are_told_to_become_one_module():
    with pytest.raises(ConfigError, match=r"matches only ModuleList. Style expert is for .* stacked: .*ModuleList hav"):
        px.shard(Listed(), {"experts": "expert"})
    with pytest.raises(ConfigError, match=r"style \"expert\" beside 'column' for '4', and they are cut along axes"):
        px.shard(mixture(), STYLES | {"4": "column"})


def written(rule: ParamRule, *, style: bool = True, axis: str = "expert") -> Plan:
    """A Plan as a person writes it."""
    return Plan(
        mesh=(Axis(name="data", size=2), Axis(name=axis, size=4)),
        params=(ParamRule(match="*"), rule),
        modules=(ModuleRule(match="1.experts", style="expert"),) if style else (),
        step=Step(batch_axes=("data", "expert") if axis == "expert" else ("data",)),
    )


def cut(match: str = "1.experts.*", axis: str = "expert", **more: object) -> ParamRule:
    return ParamRule(match=match, place=OnRanks(layout={axis: Shard(dim=0)}), managed="module", **more)


@pytest.mark.parametrize(
    ("model", "plan", "message"),
    [
        (mixture(6), written(cut()), "over 4 ranks of axis 'expert', and 6 experts are no multiple .* that divides 6"),
        (mixture(), written(cut("1.experts.up")), "its parameter 'bias' is not cut. Cut all of its parameters"),
        (mixture(), written(cut(axis="model"), axis="model"), "along 'model', where ranks read the same rows"),
        (mixture(), written(cut(update=ReduceScatter(zero=1))), "have update 'reduce_scatter', which does not know"),
        (mixture(), written(ParamRule(match="1.experts.*")), 'no rule says .* ParamRule\\(match="1.experts.\\*"'),
        (mixture(), written(cut(), style=False), "cuts parameter '1.experts.up', which module '1.experts'"),
    ],
)
def test_what_cannot_train_is_refused(model, plan, message):
    with pytest.raises(PlanError, match=message):
        check_styles(plan, model)


def test_a_plan_as_a_person_writes_it_fits():
    check_styles(written(cut()), mixture())


def test_logical_replicas_are_refused_as_sums_depend_on_the_ranks():
    assert "experts dealt to ranks" in (why_inexact(written(cut()), is_shared=False) or "")


def test_one_process_holds_all_experts():
    model = px.shard(nn.Sequential(Mixture(4, 2)), STYLES, size=2)
    before = model[0].experts.up.shape
    px.distribute(model)
    assert model(torch.randn(3, 6)).shape == (3, 6)
    assert model[0].experts.up.shape == before
