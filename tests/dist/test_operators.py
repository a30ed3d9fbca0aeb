"""Single operators of a model placed on ranks train like one process, and a Plan for another step is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

import phalanx as px
from phalanx.auto.capture.operator_sites import sites
from phalanx.auto.capture.step import capture
from phalanx.errors import PlanError
from phalanx.parallel.apply import apply
from phalanx.plan.value import Axis, Layout, ModuleRule, OpRule, Plan, Shard, Step
from ranks import run_ranks

pytestmark = pytest.mark.dist

ROWS, TOKENS, WIDTH = 4, 6, 8


class Attend(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.transpose(-1, -2)).softmax(-1) @ x


class Net(nn.Module):
    """Layers with parameters and without, a residual, and a dropout that nobody places."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, WIDTH)
        self.attend = Attend()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Conv1d(TOKENS, TOKENS, 3, padding=1)
        self.act = nn.GELU()
        self.drop = nn.Dropout(0.5)
        self.down = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        y = y + self.attend(self.norm(y))
        return self.down(self.drop(self.act(self.mix(y)))).mean(1)


def sample() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(ROWS, TOKENS, 5, generator=generator).double(), torch.arange(ROWS) % 3


def net() -> Net:
    torch.manual_seed(0)
    made = Net()
    made.double()
    return made


CASES: dict[str, list[tuple[str, int]]] = {
    "scores": [("attend:7:aten._softmax.default", 0)],
    "scores by column": [("attend:7:aten._softmax.default", 2), ("attend:5:aten.bmm.default", 1)],
    "attention": [("attend:", 0)],
    "attention by tokens": [("attend:5:aten.bmm.default", 1), ("attend:12:aten.bmm.default", 1)],
    "norm": [("norm:", 0)],
    "norm by tokens": [("norm:", 1)],
    "convolution": [("mix:", 0)],
    "several": [("up:2:aten.addmm.default", 1), ("mix:", 0), ("act:", 2), ("norm:", 1)],
}
"""What is placed: a site, or all of a module, and the dim that is cut."""


SOFTMAX, NORM, GELU, DROP = (
    "attend:7:aten._softmax.default",
    "norm:0:aten.native_layer_norm.default",
    "act:0:aten.gelu.default",
    "drop:1:aten.bernoulli_.float",
)

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"capture_digest": "0" * 16}, r"captured as 0{16}, and this model's is [0-9a-f]{16}: code or batch differ"),
    ({"site": SOFTMAX[:-2]}, rf"no operator '{SOFTMAX[:-2]}'. Did you mean '{SOFTMAX}'"),
    ({"site": NORM}, "has 1 outputs, the operator 3. Say one of each"),
    ({"site": GELU, "dim": 3}, r"lays out \[4, 6, 8\] as .*. Replicate it, or cut a dim"),
    ({"site": DROP}, "draws random numbers, of which parts would draw the same"),
    ({"site": "attnd:0:aten.gelu.default"}, "the model has no such module. Did you mean 'attend'"),
    ({"site": "gelu"}, "names no operator. Write the module, the operator's number in it and its name"),
    ({"axis": "tensor"}, "along 'tensor', which the mesh has not"),
    ({"axis": "data"}, "ranks along 'data' read other rows. Place them along one axis"),
    ({"captured": False}, "no step of this model was captured. Give the data beside the Plan"),
]
"""What is wrong with a Plan, and what is said of it."""


def plan_of(named: list[tuple[str, int]], digest: str, known: dict[str, Any]) -> Plan:
    rules = []
    for words, dim in named:
        layout: Layout = {"model": Shard(dim=dim)}
        found = [(site, len(operator.outputs)) for site, operator in known.items() if site.startswith(words)]
        rules += [OpRule(site=site, outputs=(layout,) * count) for site, count in found]
    inputs = ModuleRule(match="mix", inputs={"model": Shard(dim=0)})
    modules = (inputs,) if named == CASES["convolution"] else ()
    return Plan(mesh=MESH, capture_digest=digest, ops=tuple(rules), modules=modules, step=Step(batch_axes=("data",)))


EXPECTED = {
    "scores": {"all_gather_into_tensor": 2},
    "norm": {"all_gather_into_tensor": 2, "all_reduce": 2},
    "convolution": {"all_gather_into_tensor": 2, "all_reduce": 2},
}
"""Collectives of both passes: outputs and gradients of inputs are put together, gradients of parameters added up."""

MESH = (Axis(name="data", size=1), Axis(name="model", size=2))


def gradients(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return gradients, and how often each collective ran in both passes."""
    inputs, target = sample()
    inputs.requires_grad_()
    torch.manual_seed(1)
    with CommDebugMode() as sent:
        F.cross_entropy(model(inputs), target).backward()
    found = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    assert inputs.grad is not None
    return {**found, "inputs": inputs.grad}, {str(kind).split(".")[-1]: n for kind, n in sent.comm_counts.items()}


def of_cases() -> dict[str, Any]:
    px.init()
    expected, _ = gradients(net())
    found: dict[str, Any] = {}
    for name, named in CASES.items():
        model = net()
        captured = capture(model, sample(), F.cross_entropy)
        apply(plan_of(named, captured.digest(), sites(captured)), model)
        mine, sent = gradients(model)
        assert mine.keys() == expected.keys()
        apart = max((mine[one] - expected[one]).abs().max().item() for one in mine)
        found[name] = apart, sent, list(model.state_dict()) == list(net().state_dict())
    return {"cases": found, "refused": [refused(**change) for change, _ in REFUSED]}


def refused(
    *, site: str = SOFTMAX, dim: int = 0, outputs: int = 1, axis: str = "model", captured: bool = True, **change: Any
) -> str:
    """Return what `apply` says of a Plan; the step is captured on rank 0 alone."""
    model, elsewhere = net(), net()
    seen = capture(model if captured and px.current().rank == 0 else elsewhere, sample(), F.cross_entropy)
    layout: Layout = {axis: Shard(dim=dim)}
    rule = OpRule(site=site, outputs=(layout,) * outputs)
    plan = Plan(mesh=MESH, capture_digest=seen.digest(), ops=(rule,), step=Step(batch_axes=("data",)))
    try:
        apply(plan.model_copy(update=change), model)
    except PlanError as error:
        return str(error)
    return "applied"


def test_placed_operators_train_like_one_process_and_others_are_refused_on_all_ranks() -> None:
    first, second = run_ranks(of_cases, 2)
    for name in CASES:
        for apart, _, has_plain_keys in (first["cases"][name], second["cases"][name]):
            assert apart < 1e-10, name
            assert has_plain_keys
        assert first["cases"][name][1] == second["cases"][name][1]
    assert {name: first["cases"][name][1] for name in EXPECTED} == EXPECTED
    for (change, expected), mine, other in zip(REFUSED, first["refused"], second["refused"], strict=True):
        assert re.search(expected, mine), (change, mine)
        assert mine == other
