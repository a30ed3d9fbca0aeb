"""What a strategy's techniques become in a Plan: mesh, stages, updates, modules, step."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import PlanError
from phalanx.plan import ModelShape, ParamShape
from phalanx.plan.rules.mesh import batch_axes, mesh_from_strategy
from phalanx.plan.rules.techniques import (
    modules_from_strategy,
    scaler_from_strategy,
    schedule_from_strategy,
    update_from_strategy,
)
from phalanx.plan.stages import cut_stages, units
from phalanx.plan.value import AllReduce, Average, ModuleRule, ReduceScatter, Scaler, Schedule, TopK
from phalanx.strategy import DistributedStrategy


def chain(*weights: int) -> ModelShape:
    made = (
        ParamShape(name=f"layers.{i}.weight", shape=(w,), dtype="float32", item_bytes=4) for i, w in enumerate(weights)
    )
    return ModelShape(tuple(made))


def mesh(world: int, **settings: object) -> dict[str, int]:
    return {axis.name: axis.size for axis in mesh_from_strategy(DistributedStrategy(**settings), world)}


def test_degrees_make_the_mesh_in_fleets_order_and_copies_take_the_rest() -> None:
    assert mesh(1) == {"data": 1}
    assert mesh(4) == {"data": 4}
    assert mesh(8, hybrid_configs={"mp_degree": 2, "pp_degree": 2}) == {"data": 2, "stage": 2, "model": 2}
    assert list(mesh(8, hybrid_configs={"mp_degree": 2, "pp_degree": 2})) == ["data", "stage", "model"]
    assert list(mesh(4, hybrid_configs={"mp_degree": 2, "order": ["mp", "dp"]})) == ["model", "data"]
    assert mesh(4, sharding=True) == {"shard": 4}
    assert mesh(4, sharding=True, sharding_configs={"sharding_degree": 2}) == {"data": 2, "shard": 2}
    assert mesh(4, pipeline=True) == {"stage": 4}
    assert mesh(4, pipeline=True, hybrid_configs={"dp_degree": 2}) == {"data": 2, "stage": 2}
    assert mesh(4, context_parallel=True, context_parallel_configs={"degree": 2}) == {"data": 2, "context": 2}
    assert list(mesh(8, hybrid_configs={"mp_degree": 2, "sep_degree": 2})) == ["data", "context", "model"]
    assert mesh(4, tensor_parallel=True, tensor_parallel_configs={"tensor_parallel_degree": 4}) == {"model": 4}


def test_rows_are_split_along_copies_and_shards_only() -> None:
    axes = mesh_from_strategy(DistributedStrategy(hybrid_configs={"mp_degree": 2, "sharding_degree": 2}), 8)
    assert batch_axes(axes) == ("data", "shard")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hybrid_configs": {"mp_degree": 3}}, "asks for mp=3 ranks, which do not make up the 8"),
        ({"hybrid_configs": {"dp_degree": 2, "mp_degree": 2}}, "dp=2 x mp=2 ranks, .* launch with -n 4"),
        ({"tensor_parallel": True}, "needs to know over how many ranks"),
        (
            {"sharding": True, "sharding_configs": {"sharding_degree": 4}, "hybrid_configs": {"sharding_degree": 2}},
            "hybrid_configs says 2 and sharding_configs says 4: one degree is meant",
        ),
        ({"context_parallel": True}, "context_parallel needs to know over how many ranks"),
        ({"hybrid_configs": {"sep_degree": 3}}, "asks for sep=3 ranks, which do not make up the 8"),
    ],
)
def test_degrees_that_do_not_make_up_the_ranks_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        mesh(8, **settings)


def test_units_are_children_and_elements_of_lists() -> None:
    names = ("stem.conv.weight", "layers.0.a.weight", "layers.0.b.weight", "layers.1.a.weight", "head.weight", "scale")
    shape = ModelShape(tuple(ParamShape(name=n, shape=(1,), dtype="float32", item_bytes=4) for n in names))
    assert units(shape) == ["stem", "layers.0", "layers.1", "head"]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 7))
def test_stages_are_runs_of_units_whose_heaviest_is_as_light_as_it_can_be(weights: list[int], count: int) -> None:
    if count > len(weights):
        with pytest.raises(PlanError, match=f"{count} stages were asked for"):
            cut_stages(chain(*weights), count)
        return
    stages = list(cut_stages(chain(*weights), count).values())
    assert stages == sorted(stages)
    assert set(stages) == set(range(count))

    def heaviest(ends: tuple[int, ...]) -> int:
        edges = (0, *ends, len(weights))
        return max(sum(weights[a:b]) for a, b in itertools.pairwise(edges))

    best = min(map(heaviest, itertools.combinations(range(1, len(weights)), count - 1)))
    assert max(sum(w for w, s in zip(weights, stages, strict=True) if s == stage) for stage in range(count)) == best


def test_cuts_are_taken_as_given_and_named_when_wrong() -> None:
    shape = chain(1, 1, 1, 1)
    assert list(cut_stages(shape, 3, ("layers.1", "layers.3")).values()) == [0, 1, 1, 2]
    with pytest.raises(
        PlanError, match=r"cuts at 'layer.1', which is not a unit of this model. Did you mean 'layers.1'"
    ):
        cut_stages(shape, 2, ("layer.1",))
    with pytest.raises(PlanError, match="3 stages need 2 cuts in the order of the model"):
        cut_stages(shape, 3, ("layers.3", "layers.1"))


@pytest.mark.parametrize(
    ("settings", "update"),
    [
        ({}, AllReduce()),
        ({"fp16_allreduce": True}, AllReduce(wire_dtype="float16")),
        ({"use_hierarchical_allreduce": True}, AllReduce(route="hierarchical")),
        ({"localsgd": True, "localsgd_configs": {"k_steps": 4}}, Average(every=4)),
        ({"adaptive_localsgd": True}, Average(every=1, adaptive=True)),
        (
            {"dgc": True, "dgc_configs": {"sparsity": [0.75, 0.99], "rampup_step": 5}},
            TopK(sparsity=(0.75, 0.99), rampup_steps=5),
        ),
        ({"sharding": True, "sharding_configs": {"stage": 3}}, ReduceScatter(zero=3, along=("shard",))),
        (
            {"sharding": True, "gradient_scale_configs": {"scale_strategy": "sum"}},
            ReduceScatter(zero=1, along=("shard",), reduce="sum"),
        ),
    ],
)
def test_techniques_say_how_gradients_are_combined(settings: dict, update: object) -> None:
    strategy = DistributedStrategy(**settings)
    assert update_from_strategy(strategy, mesh_from_strategy(strategy, 2)) == update


def test_one_rule_says_all_of_a_module() -> None:
    strategy = DistributedStrategy(
        amp=True,
        recompute=True,
        recompute_configs={"checkpoints": ["layers.0"], "enable_offload": True},
        sharding=True,
        sharding_configs={"stage": 3},
    )
    rules = modules_from_strategy(strategy, chain(1, 1), mesh_from_strategy(strategy, 2))
    assert rules == (
        ModuleRule(match="", dtype="bfloat16"),
        ModuleRule(match="layers.0", recompute="full", offload=True, unit=True),
        ModuleRule(match="layers.1", unit=True),
    )


def test_a_pipeline_has_stages_and_a_schedule() -> None:
    strategy = DistributedStrategy(pipeline=True, pipeline_configs={"accumulate_steps": 4, "schedule_mode": "F-then-B"})
    axes = mesh_from_strategy(strategy, 2)
    assert [rule.stage for rule in modules_from_strategy(strategy, chain(1, 1, 2), axes)] == [0, 0, 1]
    assert schedule_from_strategy(strategy, axes) == Schedule(kind="gpipe", microbatches=4)
    with pytest.raises(PlanError, match='schedule_mode "1F1B" with virtual=2'):
        schedule_from_strategy(DistributedStrategy(pipeline=True, pipeline_configs={"virtual": 2}), axes)


def test_losses_are_scaled_in_float16_only() -> None:
    assert scaler_from_strategy(DistributedStrategy(amp=True)) is None
    strategy = DistributedStrategy(amp=True, amp_configs={"dtype": "float16", "incr_every_n_steps": 7})
    assert scaler_from_strategy(strategy) == Scaler(growth_every=7, backoff_after=2)
