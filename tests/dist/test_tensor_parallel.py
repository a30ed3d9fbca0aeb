"""Layers cut over ranks train as one process does: losses, gradients and parameters compared, put together."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as px
from phalanx.errors import PlanError
from phalanx.plan.value import Axis, ParamRule, Plan, ReduceScatter, Step
from ranks import run_ranks
from tensor_models import (
    BLOCK,
    SEQUENCE,
    Case,
    Transformer,
    cut_loss,
    difference,
    features,
    mlp,
    tokens,
    trained,
    trained_alone,
)

pytestmark = pytest.mark.dist

CHAIN = {"[02]": "column", "5": "row"}
MODEL2 = {"axis": "model", "size": 2}

WRITTEN = Plan.model_validate(
    {
        "mesh": [{"name": "model", "size": 2}],
        "params": [
            {"match": "*"},
            {
                "match": "0.*",
                "place": {"kind": "ranks", "layout": {"model": {"kind": "shard", "dim": 0, "sizes": [6, 1]}}},
                "managed": "module",
            },
        ],
        "modules": [{"match": "0", "style": "column"}],
    }
)
"""A Plan as a file says it: slices of chosen sizes, and nothing but what is not the default."""

CASES = {
    # The ranks that read five rows weigh more than those that read four.
    "hybrid": Case(mlp, CHAIN, {}, (features, 9)),
    "model": Case(mlp, CHAIN, MODEL2, (features, 9)),
    "columns alone": Case(mlp, {"*": "column"}, MODEL2, (features, 9)),
    "row alone": Case(mlp, {"2": "row"}, MODEL2, (features, 9)),
    "block": Case(Transformer, BLOCK | {"head": "column"}, MODEL2, (tokens, 5)),
    "norm of heads": Case(
        partial(Transformer, head_norm=True), BLOCK | {"block.head_norm": "column"}, MODEL2, (tokens, 5)
    ),
    "written": Case(mlp, {}, {}, (features, 9), plan=WRITTEN),
    "vocabulary": Case(Transformer, BLOCK | {"tokens": "vocab", "head": "vocab"}, MODEL2, (tokens, 5), cut_loss),
    "tied": Case(
        partial(Transformer, tied=True), BLOCK | {"tokens": "vocab", "head": "vocab"}, MODEL2, (tokens, 5), cut_loss
    ),
    "sharded": Case(
        mlp,
        CHAIN,
        {"axis": "model"},
        (features, 9),
        strategy={
            "sharding": True,
            "sharding_configs": {"stage": 3},
            "hybrid_configs": {"sharding_degree": 2, "mp_degree": 2},
        },
    ),
    "recomputed": Case(
        Transformer,
        BLOCK,
        {"axis": "model"},
        (tokens, 5),
        strategy={
            "recompute": True,
            "recompute_configs": {"checkpoints": ["block"]},
            "hybrid_configs": {"dp_degree": 2, "mp_degree": 2},
        },
    ),
    "sequence": Case(
        Transformer, BLOCK | SEQUENCE | {"tokens": "vocab", "head": "vocab"}, MODEL2, (tokens, 5), cut_loss
    ),
}
CASES |= {
    f"sequence, zero {stage}": replace(
        CASES["sequence"],
        options={"axis": "model"},
        strategy={
            "sharding": True,
            "sharding_configs": {"stage": stage, "units": ["block"]},
            "hybrid_configs": {"sharding_degree": 2, "mp_degree": 2},
        },
    )
    for stage in (2, 3)
}

CASES["sequence, compressed"] = replace(
    CASES["sequence"],
    options={"axis": "model"},
    strategy={"dgc": True, "hybrid_configs": {"dp_degree": 2, "mp_degree": 2}},
)
"""Parameters as small travel whole, so this is plain SGD; gradients are exchanged by the optimizer's step only."""


def trained_all(names: list[str]) -> dict[str, Any]:
    cases = {name: CASES[name] for name in names}
    cases |= {f"{name} in fp32": replace(case, dtype=torch.float32) for name, case in cases.items()}
    return {name: trained(case) for name, case in cases.items()}


def check(ranks: list[dict[str, Any]], names: list[str]) -> None:
    for name in names:
        for suffix, dtype, most in (("", torch.float64, 1e-12), (" in fp32", torch.float32, 1e-5)):
            expected = trained_alone(replace(CASES[name], dtype=dtype))
            late = {"norms": [], "gradients": {}} if "dgc" in CASES[name].strategy else {}
            for found in ranks:
                assert difference(found[name + suffix] | late, expected | late) <= most, name + suffix


def test_two_ranks_train_as_one():
    names = [name for name, case in CASES.items() if not case.strategy]
    ranks = run_ranks(trained_all, 2, names)
    check(ranks, names)
    hybrid, chain = ranks[0]["hybrid"]["sizes"], ranks[1]["model"]["sizes"]
    assert (hybrid["0.weight"], hybrid["2.bias"], hybrid["5.weight"], hybrid["5.bias"]) == ([4, 6], [5], [5, 5], [5])
    assert (chain["0.weight"], chain["2.bias"], chain["5.weight"], chain["5.bias"]) == ([3, 6], [4], [5, 4], [5])
    assert [found["written"]["sizes"]["0.weight"] for found in ranks] == [[6, 6], [1, 6]]
    assert (
        "(2): ModelParallelLinear(in_features=7, out_features=9, bias=True, column 0 of 2" in ranks[0]["hybrid"]["repr"]
    )


def test_four_ranks_in_a_mesh_of_two_by_two_train_as_one():
    names = ["model", "vocabulary", "sharded", "recomputed", *(name for name in CASES if name.startswith("sequence"))]
    check(run_ranks(trained_all, 4, names), names)


def test_four_ranks_along_one_axis_train_as_one():
    names = ["hybrid"]
    check(run_ranks(trained_all, 4, names), names)


def test_slices_that_some_ranks_with_other_rows_would_not_reach_are_refused():
    update = ReduceScatter(zero=2, axes=("data",))
    plan = Plan(
        mesh=(Axis(name="data", size=1), Axis(name="shard", size=1)),
        params=(ParamRule(match="*", update=update),),
        step=Step(batch_axes=("data", "shard")),
    )
    with pytest.raises(PlanError, match=r"axes = \('data',\): slices are added up along all of step.batch_axes"):
        px.distribute(nn.Linear(2, 2), plan=plan)


def begun() -> tuple[nn.Module, torch.optim.Optimizer, tuple[Tensor, Tensor]]:
    """Return a model that has trained one step already."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 3)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = torch.randn(8, 4, dtype=torch.float64), torch.arange(8) % 3
    one_step(model, optimizer, *data)
    return model, optimizer, data


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, target: Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), target).backward()
    optimizer.step()


def go_on() -> dict[str, Tensor]:
    px.init()
    model, optimizer, data = begun()
    px.shard(model, {"0": "column", "1": "row"}, axis="model", size=2)
    px.distribute(model, optimizer)
    one_step(model, optimizer, *data)
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def test_state_of_an_optimizer_is_cut_as_its_parameters_are():
    model, optimizer, data = begun()
    one_step(model, optimizer, *data)
    first, second = run_ranks(go_on, 2)
    for name, dim in (("0.weight", 0), ("0.bias", 0), ("1.weight", 1)):
        found = torch.cat([first[name], second[name]], dim)
        torch.testing.assert_close(found, model.get_parameter(name).detach(), rtol=1e-12, atol=1e-13)
