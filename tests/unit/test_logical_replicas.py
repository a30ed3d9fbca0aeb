"""What of a Plan cannot be exact with logical replicas."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from phalanx.cluster.role.role import Role
from phalanx.comm.batch.replicas import Replicas
from phalanx.comm.context import Context
from phalanx.parallel.replicas.assign import use_replicas
from phalanx.parallel.replicas.exactness import why_inexact, why_lost
from phalanx.parallel.zero.elastic_plan import describe, with_whole_gradients
from phalanx.plan.shape import ModelShape, ParamShape
from phalanx.plan.value import AllReduce, Axis, ParamRule, Plan, ReduceScatter, Scaler, Step


def plan_of(*axes: Axis) -> Plan:
    rule = ParamRule(match="*", update=AllReduce())
    return Plan(mesh=axes, params=(rule,), step=Step(batch_axes=("data",), replicas=4))


def test_data_parallel_is_exact() -> None:
    assert why_inexact(plan_of(Axis(name="data", size=2)), is_shared=True) is None


@pytest.mark.parametrize("axis", ["model", "stage", "context"])
def test_ranks_that_compute_a_replica_together_count_as_one_and_may_not_be_lost(axis: str) -> None:
    plan = plan_of(Axis(name="data", size=2), Axis(name=axis, size=2))
    assert why_inexact(plan, is_shared=True) is None
    assert "what a lost rank holds" in (why_lost(plan) or "")
    assert why_lost(plan_of(Axis(name="data", size=2))) is None


def test_replicas_that_balancing_has_moved_stay_where_another_model_asks_for_as_many() -> None:
    def use(plan: Plan, ranks: int) -> Replicas | None:
        mesh: Any = SimpleNamespace(batch_axes=("data",), size=lambda _: ranks, index=lambda _: 0)
        use_replicas(plan, mesh, context)
        return context.replicas

    context = Context(Role(world_size=2, rank=0), torch.device("cpu"))
    threads = torch.get_num_threads()
    plan = plan_of(Axis(name="data", size=2))
    try:
        first = use(plan, 2)
        assert first is not None
        first.move((range(3), range(3, 4)))
        assert use(plan, 2) is first
        assert first.assignment == (range(3), range(3, 4))
        assert use(plan, 1) is not first
    finally:
        torch.set_num_threads(threads)


def test_other_axes_are_refused() -> None:
    reason = why_inexact(plan_of(Axis(name="data", size=2), Axis(name="experts", size=2)), is_shared=True)
    assert reason is not None
    assert "'experts'" in reason


@pytest.mark.parametrize(("axis", "part"), [("stage", "a pipeline's stages"), ("context", "context parallel")])
def test_sharding_of_what_ranks_compute_together_is_refused(axis: str, part: str) -> None:
    plan = plan_of(Axis(name="data", size=2), Axis(name=axis, size=2))
    sharded = plan.model_copy(update={"params": (ParamRule(match="*", update=ReduceScatter(zero=1)),)})
    assert part in (why_inexact(sharded, is_shared=False) or "")


def sharded_plan(update: ReduceScatter, **step: Any) -> Plan:
    mesh = (Axis(name="data", size=2), Axis(name="shard", size=2))
    settings = Step(batch_axes=("data", "shard"), replicas=4, **step)
    return Plan(mesh=mesh, params=(ParamRule(match="*", update=update),), step=settings)


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (sharded_plan(ReduceScatter(zero=1, along=("shard",))), "sharding_degree"),
        (sharded_plan(ReduceScatter(zero=1, offload="cpu")), "optimize_offload"),
        (sharded_plan(ReduceScatter(zero=1), scaler=Scaler()), "float16"),
    ],
)
def test_sharding_that_cannot_go_on_without_a_rank_is_refused(plan: Plan, why: str) -> None:
    assert why in (why_lost(plan) or "")


def test_gradients_may_be_accumulated_where_ranks_leave() -> None:
    plan = sharded_plan(ReduceScatter(zero=1, axes=("data",)), accumulate=4)
    assert why_lost(plan) is None
    assert why_inexact(plan, is_shared=True, is_elastic=True) is None
    assert "gradient_merge and sharding" in (why_inexact(plan, is_shared=True) or "")


@pytest.mark.parametrize(
    ("zero", "stage"),
    [
        (1, ""),
        (2, " Stage 2 acts as stage 1: gradients stay whole until the update, so that others can finish a lost "),
        (3, "stay whole, so that others can finish a lost rank's step (12 KiB and 8 KiB on each rank). If this "),
    ],
)
def test_optimizer_state_may_be_sharded_where_ranks_leave(zero: Literal[1, 2, 3], stage: str) -> None:
    update = ReduceScatter(zero=zero, axes=("data",), reduce="sum")
    weight = ParamShape(name="weight", shape=(2, 1024), dtype="float32", item_bytes=4)
    frozen = ParamShape(name="frozen", shape=(1024,), dtype="float32", item_bytes=4, trainable=False)
    shape = ModelShape((weight, frozen))
    plan = sharded_plan(update)
    assert why_lost(plan) is None
    assert "without mirror=1" in describe(update, shape)
    assert stage in describe(update, shape)
    assert ("acts as stage 1" in describe(update, shape)) == (zero > 1)
    assert with_whole_gradients(plan).params[0].update == AllReduce(axes=("data",), reduce="sum")
    assert "keeps that of the next" in describe(update.model_copy(update={"mirror": 1}), shape)
