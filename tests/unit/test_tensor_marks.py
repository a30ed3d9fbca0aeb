"""px.shard writes the rules a person would write; what cannot be cut is refused with words that help."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from torch import nn

import phalanx as px
from phalanx.errors import ConfigError, PlanError
from phalanx.parallel.model_shape import shape_of
from phalanx.parallel.tensor.layers.gathered_linear import average
from phalanx.parallel.tensor.shard_api import with_shard_requests
from phalanx.parallel.tensor.styles import check_styles
from phalanx.plan import explain
from phalanx.plan.rules.rules import plan_from_strategy
from phalanx.plan.value import Average, Axis, Frozen, ModuleRule, OnRanks, ParamRule, Plan, Shard, Step
from phalanx.strategy import DistributedStrategy
from tensor_models import BLOCK, SEQUENCE, Transformer, mlp, tokens, whole_loss


def plan_of(model: nn.Module, world_size: int = 4, **settings: object) -> Plan:
    return with_shard_requests(plan_from_strategy(DistributedStrategy(**settings), shape_of(model), world_size), model)


def flows(plan: Plan) -> dict[str, tuple[int | None, int | None]]:
    def dim(layout: dict[str, Shard] | None) -> int | None:
        return None if layout is None else next(iter(layout.values())).dim

    return {rule.match: (dim(rule.inputs), dim(rule.outputs)) for rule in plan.modules}


def test_a_row_takes_the_cut_outputs_of_the_columns_before_it():
    model = px.shard(Transformer(), BLOCK | {"head": "column"}, axis="model", size=2)
    plan = plan_of(model)
    assert [(axis.name, axis.size) for axis in plan.mesh] == [("data", 2), ("model", 2)]
    assert flows(plan) == {
        "block.q": (None, -1),
        "block.k": (None, -1),
        "block.v": (None, -1),
        "block.o": (-1, None),
        "block.mlp.0": (None, -1),
        "block.mlp.2": (-1, None),  # the dropout between them
        "block.mlp.3": (-1, None),
        "head": (None, None),
    }
    assert plan.rule_for("block.o.weight").place == OnRanks(layout={"model": Shard(dim=1)})
    assert plan.rule_for("block.q.bias").place == OnRanks(layout={"model": Shard(dim=0)})
    assert plan.rule_for("block.o.bias") == plan.params[0]


def test_in_a_chain_only_the_last_column_before_a_row_leaves_its_output_cut():
    plan = plan_of(px.shard(mlp(), {"*": "column", "5": "row"}, axis="model", size=4))
    assert flows(plan) == {"0": (None, None), "2": (None, -1), "4": (-1, None), "5": (-1, None)}
    normed = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    assert flows(plan_of(px.shard(normed, {"0": "column", "2": "row"}, axis="model"))) == {
        "0": (None, None),
        "2": (None, None),
    }


def test_sequence_styles_cut_the_tokens_between_layers_and_add_up_gradients_of_what_stays_whole():
    styles = BLOCK | SEQUENCE | {"tokens": "vocab", "head": "vocab"}
    plan = plan_of(px.shard(Transformer(0.5), styles, axis="model", size=2))
    found = flows(plan)
    assert (found["tokens"], found["head"], found["block.o"]) == ((None, -2), (-2, -1), (-1, -2))
    assert (found["norm"], found["block.drop"], found["block.mlp.2"]) == ((-2, -2), (-2, -2), (-1, None))
    assert plan.rule_for("norm.weight").update.axes == ("data", "model")
    assert plan.rule_for("block.o.bias").update.axes == ("data", "model")
    assert plan.rule_for("block.o.weight").update.axes is None


def test_context_takes_the_outermost_modules_and_adds_up_the_gradients_of_all_in_them():
    plan = plan_of(px.shard(Transformer(), {"block*": "context"}), hybrid_configs={"sep_degree": 2})
    assert [(axis.name, axis.size) for axis in plan.mesh] == [("data", 2), ("context", 2)]
    assert plan.step.batch_axes == ("data",)
    assert flows(plan) == {"block": (-2, -2)}
    assert plan.rule_for("block.o.weight").update.axes == ("data", "context")
    assert plan.rule_for("head.weight").update.axes is None
    assert plan_of(px.shard(Transformer(), {"block": "context"}, size=4)).axis_size("context") == 4
    with pytest.raises(PlanError, match="asks for 2 ranks that compute parts of the same sequences"):
        plan_of(Transformer(), hybrid_configs={"sep_degree": 2})


def tied() -> tuple[nn.Module, nn.Module]:
    inner, head = nn.Linear(4, 4), nn.Linear(4, 4)
    head.weight = inner.weight
    return inner, head


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([nn.Sequential(nn.LSTM(4, 4))], r"'0.0' in it \(LSTM\) mixes tokens, of which each rank would have some"),
        ([nn.MultiheadAttention(4, 2)], r"'0' in it \(MultiheadAttention\) mixes tokens"),
        ([nn.Conv1d(4, 4, 3)], r"'0' in it \(Conv1d\) mixes tokens"),
        ([nn.ModuleList([nn.ModuleDict({"a": nn.Linear(4, 4)})])], "a ModuleDict there has no forward pass"),
        (tied(), r"modules\[0\] has style 'context' and shares a parameter with '1' \(weight\)"),
    ],
)
def test_what_cannot_compute_a_part_of_the_sequence_is_refused(modules, message):
    model = px.shard(nn.Sequential(*modules), {"0": "context"}, size=2)
    with pytest.raises(PlanError, match=message):
        check_styles(plan_of(model), model)


def test_a_module_is_in_one_part_only():
    rules = (
        ModuleRule(match=name, style="context", inputs={"model": Shard(dim=-2)}) for name in ("block", "block.mlp")
    )
    with pytest.raises(PlanError, match=r"modules\[block.mlp\] is in two modules with style 'context'"):
        check_styles(written(*rules, params={}), Transformer())


def test_layers_in_a_part_of_the_sequence_are_cut_along_another_axis():
    model = px.shard(px.shard(Transformer(), {"block": "context"}, axis="model", size=2), BLOCK, axis="model", size=2)
    with pytest.raises(PlanError, match=r"modules\[block.q\] has style 'column' along 'model', along which ranks have"):
        check_styles(plan_of(model), model)


def test_rows_are_gathered_where_ranks_read_rows_of_their_own():
    plan = plan_of(px.shard(mlp(), {"*": "column", "5": "row"}))
    assert [(axis.name, axis.size) for axis in plan.mesh] == [("data", 4)]
    assert flows(plan) == {"0": (None, None), "2": (None, None), "5": (None, None)}
    assert "each gathers the samples of all ranks" in plan.because[-1].effect


def test_a_strategy_with_a_model_axis_gives_the_axis():
    hybrid = {"mp_degree": 2, "dp_degree": 2}
    plan = plan_of(px.shard(mlp(), {"0": "column"}), hybrid_configs=hybrid)
    assert plan.rule_for("0.weight").place == OnRanks(layout={"model": Shard(dim=0)})
    with pytest.raises(
        PlanError, match=r"2 ranks that hold one copy .* and no layer of this model is sharded. Name them"
    ):
        plan_of(mlp(), hybrid_configs=hybrid)


def test_one_process_has_the_axis_and_cuts_nothing():
    plan = plan_of(px.shard(mlp(), {"0": "column"}, axis="model", size=2), world_size=1)
    assert plan.axis_size("model") == 1
    assert not plan.modules


def test_the_same_script_trains_alone():
    model = px.shard(Transformer(), BLOCK | SEQUENCE | {"tokens": "vocab", "head": "vocab"}, axis="model", size=2)
    plain = copy.deepcopy(model)
    px.distribute(model)
    ids, target = tokens(3)
    loss = px.vocab_cross_entropy(model(ids), target, axis="model")
    loss.backward()
    whole_loss(plain(ids), target).backward()
    assert torch.equal(model.tokens.weight.grad, plain.tokens.weight.grad)


def test_the_plan_survives_json_and_says_what_a_rank_holds():
    model = px.shard(mlp(), {"0": "column"}, axis="model", size=2)
    plan = plan_of(model)
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    check_styles(plan, model)
    row = next(row for row in explain(plan, shape_of(model)).rows if row.match == "0.weight")
    assert (row.elements, row.bytes, row.rank_bytes, row.location) == (42, 168, 96, "cut over model=2 by its layer")
    assert "all-reduce" in row.update


@pytest.mark.parametrize(
    ("styles", "message"),
    [
        ({"hed": "column"}, r"px.shard\('hed': 'column'\) matches no module. Did you mean 'head'\?"),
        ({"zzz.*": "column"}, r"matches no module. print\(model\) shows the names"),
        ({"blok": "context"}, r"px.shard\('blok': 'context'\) matches no module. Did you mean 'block'\?"),
        (
            {"block": "context", "head": "column"},
            r"style \"context\" beside 'column' for 'head', and they are cut along",
        ),
        ({"norm*": "column"}, r"matches only LayerNorm. Style column is for nn.Linear itself"),
        ({"tokens": "row"}, r"matches only Embedding"),
        (
            {"head": "colum"},
            r"px.shard knows the styles column, row, vocab, sequence, context, expert, found 'colum' for 'head'",
        ),
    ],
)
def test_a_pattern_that_cannot_act_is_an_error(styles, message):
    with pytest.raises(ConfigError, match=message):
        px.shard(Transformer(), styles)


@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        ({"axis": "model", "size": 3}, {}, "asks for 3 ranks along 'model', which do not divide the 4 ranks"),
        ({"axis": "modle"}, {}, "asks for axis 'modle', and the mesh has data. Did you mean 'model'"),
        ({"axis": "data", "size": 2}, {}, "asks for 2 ranks along 'data', but the mesh has data=4"),
        ({}, {}, "module 'tokens' has style 'vocab', which needs ranks that read the same samples"),
        (
            {"axis": "model"},
            {"localsgd": True},
            "'tokens.weight' is to be cut over ranks, but it lives with update 'ave",
        ),
    ],
)
def test_what_does_not_go_together_is_an_error(options, settings, message):
    model = px.shard(Transformer(), {"tokens": "vocab"}, **options)
    plan = plan_from_strategy(DistributedStrategy(), shape_of(model), 4)
    if settings:
        plan = plan.model_copy(update={"params": (ParamRule(match="*", update=Average(every=2)),)})
    with pytest.raises(PlanError, match=message):
        with_shard_requests(plan, model)


def test_a_frozen_layer_is_cut_and_stays_frozen():
    model = Transformer().requires_grad_(False)
    styles = BLOCK | SEQUENCE | {"tokens": "vocab", "head": "vocab"}
    plan = plan_of(px.shard(model, styles, axis="model", size=2))
    assert {type(rule.update) for name in ("head.weight", "norm.weight") if (rule := plan.rule_for(name))} == {Frozen}


def written(*modules: ModuleRule, params: dict[str, Shard], axis: str = "model", ranks: int = 2) -> Plan:
    """A Plan as a person writes it."""
    return Plan(
        mesh=(Axis(name="data", size=2), Axis(name="model", size=ranks)),
        params=(
            ParamRule(match="*"),
            *(
                ParamRule(match=name, place=OnRanks(layout={axis: shard}), managed="module")
                for name, shard in params.items()
            ),
        ),
        modules=modules,
        step=Step(batch_axes=("data",)),
    )


COLUMN = ModuleRule(match="head", style="column")
WEIGHT, BIAS = {"head.weight": Shard(dim=0)}, {"head.bias": Shard(dim=0)}


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            written(COLUMN, params={}),
            r"no rule says along which axis its weight is cut. Add ParamRule\(match=\"head.we",
        ),
        (written(COLUMN, params={"head.weight": Shard(dim=1)} | BIAS), "cut along dim 1; style 'column' needs dim 0"),
        (
            written(COLUMN, params={"head.weight": Shard(dim=0, sizes=(9, 1))} | BIAS),
            r"\(9, 1\), which are not 2 above 0 that add",
        ),
        (
            written(COLUMN, params={"head.weight": Shard(dim=0)} | BIAS, ranks=12),
            r"params\[head.weight\] has 11 slices along dim 0 for the 12 ranks of axis 'model'. Leave 'head' out",
        ),
        (written(params=WEIGHT), r"cuts parameter 'head.weight', which module 'head' \(Linear\) uses whole"),
        (written(COLUMN, params=WEIGHT), r"so its bias is cut as its weight is, found \{'weight': \(6, 5\)\}"),
        (written(ModuleRule(match="norm", style="sequence"), params={}), "does not say along which axis its input is"),
        (
            written(ModuleRule(match="tokens", style="row"), params={"tokens.weight": Shard(dim=1)}),
            "has style 'row' along 'model', where ranks read the same rows, and is a Embedding. There it is for Linear",
        ),
        (
            written(ModuleRule(match="head", style="row"), params={"head.weight": Shard(dim=1)} | BIAS),
            r"params\[head.bias\] is cut, but a row-parallel layer adds its bias whole",
        ),
    ],
)
def test_a_plan_whose_rules_do_not_fit_is_an_error(plan, message):
    with pytest.raises(PlanError, match=message):
        check_styles(plan, Transformer())


def test_a_shared_weight_is_cut_with_all_its_layers_or_not_at_all():
    model = px.shard(Transformer(tied=True), {"tokens": "vocab"}, axis="model", size=2)
    with pytest.raises(PlanError, match=r"cuts parameter 'tokens.weight', which module 'head' \(Linear\) uses whole"):
        check_styles(plan_of(model), model)


def test_an_embedding_that_needs_all_its_rows_is_refused():
    model = nn.Sequential(nn.Embedding(8, 4, max_norm=1.0))
    plan = plan_of(px.shard(model, {"0": "vocab"}, axis="model", size=2))
    with pytest.raises(PlanError, match="is an embedding with max_norm, which needs all of its rows on one rank"):
        check_styles(plan, model)


def test_classes_that_do_not_divide_are_an_error_unless_slices_may_differ():
    with pytest.raises(
        ValueError, match="Number of classes must be divisible by the number of ranks, found 10 classes"
    ):
        px.ModelParallelLinear(4, 3, 0, 10)
    with pytest.raises(ValueError, match="rank_id 3 is none of 3 ranks"):
        px.ModelParallelLinear(4, 3, 3, 9)
    shapes = [tuple(px.ModelParallelLinear(4, 3, rank, 10, uneven=True).weight.shape) for rank in range(3)]
    assert shapes == [(4, 4), (3, 4), (3, 4)]


def test_shards_made_under_one_seed_are_slices_of_the_plain_layer():
    torch.manual_seed(3)
    plain, after = nn.Linear(4, 10), torch.rand(1)
    shards = []
    for rank in range(3):
        torch.manual_seed(3)
        shards.append(px.ModelParallelLinear(4, 3, rank, 10, uneven=True))
        assert torch.equal(torch.rand(1), after)
    assert torch.equal(torch.cat([shard.weight for shard in shards]), plain.weight)
    assert torch.equal(torch.cat([shard.bias for shard in shards]), plain.bias)
    assert all(param.is_distributed is True for shard in shards for param in shard.parameters())


def test_gradients_are_divided_in_layers_that_a_plan_made_and_by_hooks_elsewhere():
    def gradient(layer: px.ModelParallelLinear, count: int) -> torch.Tensor:
        average(layer, dict.fromkeys(layer.parameters(), count))
        nn.functional.linear(torch.ones(2, 4), layer.weight).sum().backward()
        return layer.weight.grad

    made, planned, both = (px.ModelParallelLinear(4, 1, 0, 3) for _ in range(3))
    planned.is_planned = both.is_planned = True
    assert torch.equal(gradient(made, 2), torch.ones(3, 4)), "code of one's own may read the slice"
    assert torch.equal(gradient(planned, 2), torch.full((3, 4), 2.0)), "only what comes through the layer is divided"
    assert (made.shares, planned.shares) == (1, 2)
    average(nn.Sequential(made, both), dict.fromkeys([*made.parameters(), *both.parameters()], 2))
    assert both.shares == 1, "one way for all of a model"


def test_alone_the_layer_is_linear_and_can_be_copied_and_pickled():
    layer = px.ModelParallelLinear(4, 1, 0, 10)
    x = torch.randn(3, 4)
    for one in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(one(x), nn.functional.linear(x, layer.weight, layer.bias))
    with pytest.raises(ConfigError, match="a ModelParallelLinear of 4 inputs takes 4 of them on this rank, found 5"):
        layer(torch.randn(3, 5))
    with pytest.raises(ConfigError, match="made as part 1 of 2 was used on rank 0 of 1"):
        px.ModelParallelLinear(4, 2, 1, 10)(x)


def test_marks_come_before_the_model_is_distributed():
    model = px.DataParallel(mlp())
    with pytest.raises(ConfigError, match=r"distributed already. Call px.shard before"):
        px.shard(model, {"0": "column"})
    marked = px.shard(mlp(), {"0": "column"})
    with pytest.raises(PlanError, match=r"px.shard was called for this model, and a Plan was given"):
        px.distribute(marked, plan=Plan())
    del model, marked
    gc.collect()


def test_fractions_say_which_layers_weigh_and_which_compute():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, 5))
    px.distribute(model)
    found = px.explain(model, torch.zeros(2, 1, 6, 6))
    assert [(kind.kind, kind.parameters, kind.multiplications) for kind in found.kinds] == [
        ("convolution", 20, 2 * 2 * 16 * 9),
        ("fully connected", 165, 2 * 160),
    ]
    assert "fully connected" in str(found)
    assert model.training
