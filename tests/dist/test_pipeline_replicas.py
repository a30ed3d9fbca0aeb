"""Logical replicas of a pipeline: groups of stages count as one rank, and the weights have the same bits on any."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as px
from phalanx.errors import PlanError
from phalanx.plan import Plan
from phalanx.plan.value import AllReduce, Axis, ModuleRule, ParamRule, ReduceScatter, Schedule, Step
from ranks import run_ranks

pytestmark = pytest.mark.dist

STAGES = 2
SAMPLES, GLOBAL, STEPS = 66, 24, 7
"""The last global batch of an epoch has 18 samples: of 4 replicas two get 5, and two get 4."""


def net() -> nn.Module:
    """Return a chain with batch norm and dropout in both stages."""
    return nn.Sequential(
        *(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Dropout(0.2)),
        *(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 3)),
    )


def plan_of(groups: int, replicas: int, kind: str, **update: Any) -> Plan:
    stages = tuple(ModuleRule(match=str(index), stage=int(index >= 4)) for index in range(9))
    axes = (Axis(name="data", size=groups),) * (groups > 1)
    return Plan(
        mesh=(*axes, Axis(name="stage", size=STAGES)),
        params=(ParamRule(match="*", **update),),
        modules=stages,
        schedule=Schedule(kind=kind, microbatches=2),
        step=Step(batch_axes=("data",) * (groups > 1), replicas=replicas),
    )


def train(replicas: int, kind: str) -> dict[str, Tensor]:
    """Train on this job's ranks; return the parameters and buffers that this one holds."""
    groups = px.init().world_size // STAGES
    torch.manual_seed(1)
    model, generator = net(), torch.Generator().manual_seed(0)
    data = torch.randn(SAMPLES, 6, generator=generator), torch.randint(3, (SAMPLES,), generator=generator)
    model, optimizer, loader = px.distribute(
        model,
        torch.optim.AdamW(model.parameters(), 0.01),
        torch.utils.data.TensorDataset(*data),
        global_batch=GLOBAL,
        plan=plan_of(groups, replicas, kind),
        seed=5,
    )
    step, updates = px.train_step(model, F.cross_entropy, optimizer), 0
    while updates < STEPS:
        for x, y in loader:
            step(x, y)
            updates += px.has_updated(optimizer)
            if updates == STEPS:
                break
    return {name: value for name, value in model.state_dict().items() if not value.is_meta}


@pytest.mark.parametrize(("replicas", "kind"), [(2, "gpipe"), (4, "1f1b")])
def test_a_pipeline_counts_as_one_rank(replicas: int, kind: str) -> None:
    one, two = (run_ranks(train, STAGES * groups, replicas, kind) for groups in (1, 2))
    names = {name for held in one for name in held}
    assert {"0.weight", "1.running_mean", "8.bias"} <= names
    for rank, held in enumerate(two):
        stage = one[rank % STAGES]
        assert stage.keys() == held.keys()
        for name, value in held.items():
            if rank < STAGES or value.is_floating_point():  # numbers of micro-batches are those of replica 0 there
                assert torch.equal(value, stage[name]), name


def gradient_of_one_step(replicas: int | None) -> dict[str, Tensor]:
    """Return the gradients of one global batch, that of one process if there are no replicas."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).double()
    data = torch.randn(10, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), torch.arange(10) % 3
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan = None
    if replicas is not None:
        plan = plan_of(px.init().world_size // STAGES, replicas, "1f1b").model_copy(
            update={"modules": tuple(ModuleRule(match=str(index), stage=int(index > 0)) for index in range(3))}
        )
    model, optimizer, loader = px.distribute(
        model, optimizer, torch.utils.data.TensorDataset(*data), global_batch=10, shuffle=False, plan=plan
    )
    step = px.train_step(model, F.cross_entropy, optimizer)
    for x, y in loader:
        step(x, y)
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def test_the_gradient_is_that_of_one_process() -> None:
    expected = run_ranks(gradient_of_one_step, 1, None)[0]
    for groups in (1, 2):
        for held in run_ranks(gradient_of_one_step, STAGES * groups, 3):
            assert held
            for name, gradient in held.items():
                assert (gradient - expected[name]).norm() <= 1e-12 * expected[name].norm()


def refusal(update: str) -> str:
    model = net()
    model[1].momentum = None if update == "momentum" else 0.1
    kind = {"update": ReduceScatter(zero=1) if update == "sharding" else AllReduce()}
    plan = plan_of(1, 2, "1f1b", **kind)
    if update == "gradient_merge":
        plan = plan.model_copy(update={"step": plan.step.model_copy(update={"accumulate": 2})})
    with pytest.raises(PlanError) as error:
        px.distribute(model, torch.optim.SGD(model.parameters(), 0.1), plan=plan)
    return str(error.value)


@pytest.mark.parametrize(
    ("what", "part"),
    [
        ("sharding", "logical replicas cannot be combined with sharding of a pipeline"),
        ("gradient_merge", "logical replicas cannot be combined with gradient_merge of a pipeline"),
        ("momentum", "'1' averages its statistics over all micro-batches"),
    ],
)
def test_what_a_pipeline_cannot_add_up_exactly_is_an_error(what: str, part: str) -> None:
    for message in run_ranks(refusal, STAGES, what):
        assert part in message
