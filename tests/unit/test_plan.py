"""The Plan as a value: rules, files, explanation."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from phalanx.errors import PlanError
from phalanx.plan import ModelShape, ParamShape, Plan, explain, load_plan, plan_from_strategy, save_plan
from phalanx.plan.value import (
    AllReduce,
    Average,
    Axis,
    Frozen,
    ModuleRule,
    OnRanks,
    OpRule,
    ParamRule,
    Push,
    Reason,
    ReduceScatter,
    Replicate,
    Schedule,
    Server,
    Shard,
    Step,
    Table,
    TopK,
    matches,
)
from phalanx.strategy import DistributedStrategy


def shape(*params, dtype="float32"):
    return ModelShape(tuple(ParamShape(name=n, shape=s, dtype=dtype, item_bytes=4) for n, s in params))


SMALL = shape(("fc.weight", (10, 4)), ("fc.bias", (10,)))

EVERYTHING = Plan(
    model_digest="0" * 16,
    capture_digest="1" * 16,
    mesh=(Axis(name="data", size=2), Axis(name="tp", size=2), Axis(name="pp", size=2)),
    servers=2,
    params=(
        ParamRule(match="*", update=AllReduce(wire_dtype="bfloat16", route="hierarchical")),
        ParamRule(
            match="fc.*",
            place=OnRanks(layout={"tp": Shard(dim=0, sizes=(6, 4))}),
            update=ReduceScatter(zero=3),
        ),
        ParamRule(match="emb.*", place=Server(table="ids"), update=Push(mode="geo", steps=100)),
        ParamRule(match="local.*", update=Average(every=4)),
        ParamRule(match="sparse.*", update=TopK(sparsity=(0.75, 0.999))),
        ParamRule(match="old.*", update=Frozen()),
        ParamRule(match="own.*", managed="module"),
    ),
    modules=(
        ModuleRule(match="fc", style="column", inputs={"tp": Replicate()}, outputs={"tp": Shard(dim=-1)}),
        ModuleRule(
            match="block.*",
            stage=1,
            unit=True,
            recompute="full",
            offload=True,
            dtype="bfloat16",
        ),
    ),
    ops=(OpRule(site="mm_3", outputs=({"tp": Shard(dim=1)},)),),
    tables=(Table(name="ids", module="emb", dim=16, optimizer="adagrad(lr=0.05)"),),
    schedule=Schedule(kind="interleaved", microbatches=8, virtual=2),
    step=Step(batch_axes=("data",), accumulate=2, compiled=True),
    because=(Reason(setting="memory 80 GiB", effect="ZeRO 3"),),
)


def test_a_plan_that_says_everything_survives_a_file(tmp_path):
    path = tmp_path / "plan.json"
    save_plan(EVERYTHING, path)
    assert load_plan(path) == EVERYTHING


def test_the_default_plan_survives_a_file(tmp_path):
    path = tmp_path / "plan.json"
    save_plan(Plan(), path)
    assert load_plan(path) == Plan()
    assert json.loads(path.read_text()) == {"version": 1}


def test_a_plan_is_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        Plan().servers = 3


def test_the_digest_ignores_reasons_and_nothing_else():
    assert EVERYTHING.digest() == EVERYTHING.model_copy(update={"because": ()}).digest()
    assert EVERYTHING.digest() != EVERYTHING.model_copy(update={"servers": 3}).digest()


def test_the_last_matching_rule_wins():
    assert EVERYTHING.rule_for("fc.weight").update == ReduceScatter(zero=3)
    assert EVERYTHING.rule_for("conv.weight").match == "*"


def test_a_name_with_brackets_matches_itself():
    plan = Plan(params=(ParamRule(match="blocks[0].weight", update=Frozen()),))
    assert isinstance(plan.rule_for("blocks[0].weight").update, Frozen)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"step": Step(batch_axes=("dat",))}, "names mesh axis 'dat'"),
        ({"mesh": (Axis(name="a", size=2), Axis(name="a", size=2))}, "axis names repeat"),
        ({"params": (ParamRule(match="*", place=Server(table="t")),)}, "lives in table 't'"),
        ({"ops": (OpRule(site="mm", outputs=()),)}, "capture digest"),
        (
            {
                "mesh": (Axis(name="data", size=2),),
                "params": (ParamRule(match="w", place=OnRanks(layout={"data": Shard(dim=0, sizes=(4,))})),),
            },
            r"params\[w\] cuts along data=2 into sizes \(4,\)",
        ),
    ],
)
def test_a_plan_that_refers_to_what_is_not_there_is_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        Plan(**fields)


def test_geo_needs_its_steps_and_sync_takes_none():
    with pytest.raises(ValidationError, match="needs `steps`"):
        Push(mode="geo")
    with pytest.raises(ValidationError, match="takes no `steps`"):
        Push(mode="sync", steps=2)


def test_a_missing_file_says_how_to_make_one(tmp_path):
    with pytest.raises(PlanError, match="Write one with"):
        load_plan(tmp_path / "none.json")


def test_rules_make_the_same_plan_twice_and_reduce_every_trained_parameter():
    strategy = DistributedStrategy(fuse_grad_size_in_MB=64)
    plan = plan_from_strategy(strategy, SMALL, 2)
    assert plan == plan_from_strategy(strategy, SMALL, 2)
    assert plan.world_size == 2
    assert all(plan.rule_for(p.name).update == AllReduce(bucket_bytes=64 * 2**20) for p in SMALL.params)


def test_frozen_and_module_held_parameters_get_rules_of_their_own():
    model = ModelShape(
        (
            ParamShape(name="a", shape=(2,), dtype="float32", item_bytes=4, trainable=False),
            ParamShape(name="b", shape=(2,), dtype="float32", item_bytes=4, is_distributed=True),
            ParamShape(name="c", shape=(2,), dtype="float32", item_bytes=4),
        )
    )
    plan = plan_from_strategy(DistributedStrategy(), model, 2)
    assert isinstance(plan.rule_for("a").update, Frozen)
    assert plan.rule_for("b").managed == "module"
    explanation = explain(plan, model)
    assert (explanation.gradients, explanation.collectives) == (1, 1)


def test_explain_counts_what_each_rule_covers():
    explanation = explain(plan_from_strategy(DistributedStrategy(), SMALL, 2), SMALL)
    told = json.loads(explanation.to_json())
    assert told["mesh"] == {"data": 2}
    assert told["rules"][0]["elements"] == 50
    assert told["reduced_bytes_per_step"] == 200
    assert told["collectives_per_step"] == 1


def test_explain_names_the_axis_along_which_tokens_are_apart():
    styled = (("a", "context", "context"), ("b", "sequence", "model"), ("c", "column", "model"))
    plan = Plan(
        mesh=(Axis(name="context", size=2), Axis(name="model", size=4)),
        modules=tuple(ModuleRule(match=m, style=style, inputs={axis: Shard(dim=-2)}) for m, style, axis in styled),
    )
    shown = explain(plan, ModelShape(params=()))
    gathered = "attention sees all, whose keys and values every rank gathers"
    assert f"a: each rank along context=2 computes 1/2 of the tokens; {gathered}\n" in str(shown)
    assert "b: each rank along model=4 computes 1/4 of the tokens" in str(shown)
    assert [one["match"] for one in json.loads(shown.to_json())["tokens"]] == ["a", "b"]


def test_explain_with_one_rank_reduces_nothing():
    explanation = explain(plan_from_strategy(DistributedStrategy(), SMALL, 1), SMALL)
    assert explanation.collectives == 0
    assert explanation.rows[0].location == "this rank"


@given(st.integers(1, 8), st.floats(0.1, 100), st.booleans(), st.sampled_from(["avg", "sum"]))
def test_a_strategy_always_makes_a_plan_that_survives_json(world, mib, fused, scale):
    strategy = DistributedStrategy(
        fuse_grad_size_in_MB=mib, fuse_all_reduce_ops=fused, gradient_scale_configs={"scale_strategy": scale}
    )
    plan = plan_from_strategy(strategy, SMALL, world)
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


# --- parameter servers ----------------------------------------------------------------------------------------------

IDS = Table(name="ids", module="emb", dim=8, optimizer="adagrad(lr=0.05)", entry="count(count=10)")
WIDE = ModelShape(
    (ParamShape(name="emb.handle", shape=(0, 8), dtype="float32", item_bytes=4, table=IDS), *SMALL.params)
)


def test_with_servers_rows_and_dense_parameters_are_pushed():
    plan = plan_from_strategy(DistributedStrategy(), WIDE, 2, 3)
    rule = plan.rule_for("emb.handle")
    assert (rule.place, rule.update) == (Server(table="ids"), Push(mode="async"))
    assert plan.rule_for("fc.weight").place == Server(table="dense")
    assert (plan.servers, [table.name for table in plan.tables]) == (3, ["ids", "dense"])
    assert explain(plan, WIDE).collectives == 0


def test_hybrid_reduces_dense_gradients_and_pushes_rows():
    strategy = DistributedStrategy(a_sync=True, a_sync_configs={"dense": "all_reduce"})
    plan = plan_from_strategy(strategy, WIDE, 2, 1)
    assert isinstance(plan.rule_for("fc.weight").update, AllReduce)
    assert plan.rule_for("emb.handle").update == Push(mode="async")
    assert explain(plan, WIDE).gradients == 2


def test_tables_of_several_workers_need_a_server():
    with pytest.raises(PlanError, match=r"2 workers share table 'ids'.*phalanx run --server-num 1 --worker-num 2"):
        plan_from_strategy(DistributedStrategy(), WIDE, 2)


def test_one_process_holds_its_tables_itself():
    explanation = explain(plan_from_strategy(DistributedStrategy(), WIDE, 1), WIDE)
    (table,) = json.loads(explanation.to_json())["tables"]
    assert (table["table"], table["lives"], table["rule"]) == ("ids", "this process", "adagrad(lr=0.05)")
    assert "its table is in this process" in str(explanation)


def test_explain_says_of_each_table_what_it_is_and_where_it_lives():
    strategy = DistributedStrategy(a_sync=True, a_sync_configs={"k_steps": 100})
    text = str(explain(plan_from_strategy(strategy, WIDE, 2, 2), WIDE))
    for words in ("push (geo, 100 steps)", "2 servers", "count(count=10)", "adagrad(lr=0.05)", "table dense"):
        assert words in text


def test_a_plan_with_servers_survives_a_file(tmp_path):
    plan = plan_from_strategy(DistributedStrategy(a_sync=False), WIDE, 2, 1)
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("not json", "plan: Invalid JSON"),
        ('"mesh": [{"name": "data", "size": 0}]', "mesh.0.size: Input should be greater than 0, found 0"),
        ('"version": 2', "version: Input should be 1, found 2"),
        ('"mehs": []', "mehs: there is no such field. Did you mean 'mesh'?"),
        ('"mesh": [{"name": "data", "size": "2"}]', "mesh.0.size: Input should be a valid integer, found '2'"),
        ('"mesh": [{"name": "data", "size": true}]', "mesh.0.size: Input should be a valid integer, found True"),
        ('"step": {"scaler": {"initial": NaN}}', "step.scaler.initial: Input should be a finite number, found nan"),
        ('"step": {"scaler": {"backoff": -1}}', "step.scaler.backoff: Input should be greater than 0, found -1"),
        ('"params": [{"match": "*", "update": {"kind": "top_k", "sparsity": []}}]', "should have at least 1 item"),
        ('"tables": [{"name": "t", "module": "a", "dim": 2}, {"name": "t", "module": "b", "dim": 2}]', "names repeat"),
    ],
)
def test_a_file_by_hand_that_is_wrong_says_where_and_what_was_found(tmp_path, wrong, why):
    (tmp_path / "plan.json").write_text(f"{{{wrong}}}")
    with pytest.raises(PlanError, match=re.escape(why)):
        load_plan(tmp_path / "plan.json")


def test_a_folder_is_no_plan(tmp_path):
    with pytest.raises(PlanError, match=r"the Plan in .* cannot be read: Is a directory"):
        load_plan(tmp_path)


@pytest.mark.parametrize(
    ("cut", "why"),
    [
        (Shard(dim=2), r"cuts dim 2 of 'fc.weight', whose shape is \[10, 4\]"),
        (Shard(dim=-3), r"cuts dim -3 of 'fc.weight'"),
        (Shard(dim=0, sizes=(3, 3)), r"which has 10, into \[3, 3\]\. Give sizes that add up"),
    ],
)
def test_a_cut_that_a_parameter_cannot_have_is_named(cut, why):
    rule = ParamRule(match="fc.weight", place=OnRanks(layout={"data": cut}), managed="module")
    plan = Plan(mesh=(Axis(name="data", size=2),), params=(rule,))
    with pytest.raises(PlanError, match=why):
        explain(plan, SMALL)


@given(
    st.lists(st.sampled_from(["*", "a*", "a.b", "a[0]", "?.b", "b", "[ab]*", "c"]), max_size=6),
    st.sampled_from(["a.b", "a[0]", "b", "b.b", "c", "a0"]),
)
def test_the_last_rule_that_matches_is_found_among_all(patterns, name):
    plan = Plan(params=tuple(ParamRule(match=p, update=Average(every=n + 1)) for n, p in enumerate(patterns)))
    matching = [rule for rule in plan.params if matches(rule.match, name)]
    assert plan.rule_for(name) == (matching[-1] if matching else ParamRule(match="*"))
    other = plan.model_copy(update={"params": (*plan.params, ParamRule(match=name, update=Frozen()))})
    assert other.rule_for(name).update == Frozen()


def test_a_copy_with_other_rules_goes_by_these():
    plan = Plan(params=(ParamRule(match="*"), ParamRule(match="old.*", update=Frozen())))
    assert plan.rule_for("old.weight").update.kind == "frozen"
    copied = plan.model_copy(update={"params": (ParamRule(match="*"),)})
    assert copied.rule_for("old.weight").update.kind == "all_reduce"
    assert plan.model_copy() == plan


@pytest.mark.parametrize("text", ['{"step": {"sink": 2}}', '{"modules": [{"match": "fc", "compiled": true}]}'])
def test_a_plan_has_no_field_that_nothing_applies(text):
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        Plan.model_validate_json(text)
