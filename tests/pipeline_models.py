"""Models, Plans and the one-process reference for the tests of pipelines."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as px
from phalanx.plan import Plan
from phalanx.plan.value import Axis, ModuleRule, ParamRule, Schedule, Step

WIDTH, CLASSES, STEPS = 6, 3, 3


class Scaled(nn.Module):
    """A unit that hands a tuple on, and in it something that its input has no part in."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return x * self.weight, {"squares": (x * x).transpose(0, 1), "shift": self.weight.tanh()}


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: tuple[Tensor, dict[str, Tensor]]) -> Tensor:
        return self.linear(pair[0]) + pair[1]["squares"].transpose(0, 1) + pair[1]["shift"]


def chain(norm: type[nn.Module] = nn.LayerNorm) -> nn.Module:
    """A chain with a nested one, a layer that changes its input in place, and a tuple between units."""
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.Tanh()),
        Scaled(),
        Joined(),
        norm(WIDTH),
        nn.Linear(WIDTH, CLASSES),
    )


class Glued(nn.Module):
    """Functional glue, a list of blocks, a residual over stages, a parameter of its own, and a size carried over."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.linspace(-1.0, 1.0, WIDTH))
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(2 * WIDTH, 2 * WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        rows, width = x.shape
        kept = x + self.shift if mask is None else x * mask
        h = F.gelu(self.first(kept))
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        h = h.view(rows, 2, width).sum(1)
        return self.head(h + kept)


def frozen_start() -> nn.Module:
    model = chain()
    for param in model[0].parameters():
        param.requires_grad = False
    for param in model[1].parameters():
        param.requires_grad = False
    return model


@dataclass(frozen=True)
class Case:
    """One model, its stages, and how micro-batches go through them."""

    build: Callable[[], nn.Module]
    stages: dict[str, int]
    schedule: Schedule
    rows: int = 8
    """Of a global batch."""

    total: int = 0
    """Rows of the data; whole batches when 0."""

    mesh: tuple[Axis, ...] = (Axis(name="stage", size=2),)
    update: dict[str, Any] = field(default_factory=dict)
    sync_bn: bool = False

    def plan(self) -> Plan:
        data = tuple(axis.name for axis in self.mesh if axis.name == "data")
        return Plan(
            mesh=self.mesh,
            params=(ParamRule(match="*", **self.update),),
            modules=tuple(ModuleRule(match=name, stage=stage) for name, stage in self.stages.items()),
            schedule=self.schedule,
            step=Step(batch_axes=data, sync_bn=self.sync_bn),
        )


def made(case: Case) -> tuple[nn.Module, torch.optim.Optimizer, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = case.build().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    rows = case.total or case.rows * STEPS
    return model, optimizer, (torch.randn(rows, WIDTH, generator=generator).double(), torch.arange(rows) % CLASSES)


def trained(case: Case) -> dict[str, Any]:
    """Train on this job's ranks; each tells of the parameters it holds."""
    px.init()
    model, optimizer, data = made(case)
    model, optimizer, loader = px.distribute(
        model, optimizer, torch.utils.data.TensorDataset(*data), global_batch=case.rows, shuffle=False, plan=case.plan()
    )
    step = px.train_step(model, F.cross_entropy, optimizer, fetch={"rows": lambda out, y: out.new_tensor(len(out))})
    losses, gradients, seen = [], {}, []
    for inputs, target in loader:
        out = step(inputs, target)
        losses.append(px.global_mean(out.loss).item())
        seen.append(int(out["rows"]))
        gradients = gradients or {
            name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None
        }
    with torch.no_grad():
        output = model.eval()(data[0][:5])
    held = {name: value for name, value in model.state_dict().items() if not value.is_meta}
    keys = list(model.state_dict())
    state = len(optimizer.state)
    del model, optimizer, loader, step
    gc.collect()  # the next case may read its rows another way
    return {
        "losses": losses, "gradients": gradients, "parameters": held, "output": output, "keys": keys, "rows": seen,
        "state": state,
    }  # fmt: skip


def trained_alone(case: Case) -> dict[str, Any]:
    """Train in one process on whole batches; batch norm sees micro-batches, as the ranks' does."""
    model, optimizer, data = made(case)
    losses, gradients = [], {}
    for inputs, target in zip(*(part.split(case.rows) for part in data), strict=True):
        optimizer.zero_grad()
        total = 0.0
        for xs, ys in _micro_batches(case, inputs, target):
            loss = F.cross_entropy(model(xs), ys) * (len(xs) / len(inputs))
            loss.backward()
            total += loss.item()
        losses.append(total)
        gradients = gradients or {
            name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None
        }
        optimizer.step()
    with torch.no_grad():
        output = model.eval()(data[0][:5])
    return {
        "losses": losses, "gradients": gradients, "parameters": dict(model.state_dict()), "output": output,
        "keys": list(model.state_dict()),
    }  # fmt: skip


def _micro_batches(case: Case, inputs: Tensor, target: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return those of each copy in turn; where copies normalise together, those that all of them run at a time."""
    shares = math.prod(axis.size for axis in case.mesh if axis.name == "data")
    by_copy = []
    for x, y in zip(inputs.tensor_split(shares), target.tensor_split(shares), strict=True):
        size = next(len(x) // n for n in range(case.schedule.microbatches, 0, -1) if len(x) % n == 0)
        by_copy.append(list(zip(x.split(size), y.split(size), strict=True)))
    if not case.sync_bn:
        return [micro for copy in by_copy for micro in copy]
    return [tuple(map(torch.cat, zip(*micros, strict=True))) for micros in zip(*by_copy, strict=True)]


def check(ranks: list[dict[str, Any]], case: Case) -> None:
    """Compare what the ranks found with one process, parameter by parameter."""
    expected = trained_alone(case)
    largest = {kind: max(_norm(value) for value in expected[kind].values()) for kind in ("gradients", "parameters")}
    for kind in largest:
        names = {name for found in ranks for name in found[kind]}
        assert names == set(expected[kind]), kind
        for found in ranks:
            for name, value in found[kind].items():
                assert _distance(value, expected[kind][name], largest[kind]) <= 1e-12, (kind, name)
    for found in ranks:
        assert found["keys"] == expected["keys"]
        assert max(abs(a - b) for a, b in zip(found["losses"], expected["losses"], strict=True)) <= 1e-12
        assert _distance(found["output"], expected["output"], _norm(expected["output"])) <= 1e-12
        assert len(found["parameters"]) < len(expected["parameters"])
        assert found["state"] == len(found["gradients"])


def _norm(tensor: Tensor) -> float:
    return tensor.double().norm().item()


def _distance(value: Tensor, expected: Tensor, largest: float) -> float:
    """Return the distance of two tensors, relative to their norm, or a tenth of the largest of their kind.

    The gradient of a bias before a batch norm is 0: a sum of terms that cancel, of which their rounding is left.
    """
    return _norm(value - expected) / max(_norm(expected), largest / 10)


CHAIN2 = {"0": 0, "1": 0, "2": 0, "3": 1, "4": 1, "5": 1}
UNEVEN2 = {"0": 0, "1": 1, "2": 1, "3": 1, "4": 1, "5": 1}
CHAIN4 = {"0": 0, "1": 1, "2": 2, "3": 2, "4": 3, "5": 3}
GLUED2 = {"first": 0, "blocks.0": 0, "blocks.1": 0, "blocks.2": 1, "head": 1}
GLUED4 = {"first": 0, "blocks.0": 1, "blocks.1": 1, "blocks.2": 2, "head": 3}

GPIPE = Schedule(kind="gpipe", microbatches=4)
F1B1 = Schedule(kind="1f1b", microbatches=4)
INTERLEAVED = Schedule(kind="interleaved", microbatches=4, virtual=2)
ZERO = Schedule(kind="zero_bubble", microbatches=4)
ZERO_V = Schedule(kind="zero_bubble", microbatches=4, virtual=2)

TWO = {
    "gpipe": Case(chain, CHAIN2, GPIPE),
    "1f1b, uneven cut": Case(chain, UNEVEN2, F1B1),
    "batch norm": Case(partial(chain, nn.BatchNorm1d), CHAIN2, F1B1),
    "interleaved": Case(chain, CHAIN4, INTERLEAVED),
    "zero bubble": Case(chain, CHAIN2, ZERO),
    "zero bubble in a v": Case(chain, CHAIN4, ZERO_V),
    "glue": Case(Glued, GLUED2, F1B1),
    "glue, zero bubble in a v": Case(Glued, GLUED4, ZERO_V),
    "glue, interleaved": Case(Glued, GLUED4, INTERLEAVED),
    "frozen start": Case(frozen_start, {"0": 0, "1": 0, "2": 1, "3": 1, "4": 1, "5": 1}, F1B1),
    "frozen start, zero bubble in a v": Case(frozen_start, {"0": 0, "1": 0, "2": 1, "3": 2, "4": 3, "5": 3}, ZERO_V),
    # The last batch has 6 rows: three micro-batches.
    "last batch": Case(Glued, GLUED2, GPIPE, total=22),
}

DATA_BY_STAGE = (Axis(name="data", size=2), Axis(name="stage", size=2))
FOUR_STAGES = (Axis(name="stage", size=4),)
FOUR = {
    # Shares of 7 rows are 4 and 3, of the last batch of 4 rows 2 and 2.
    "copies": Case(chain, CHAIN2, F1B1, rows=9, total=22, mesh=DATA_BY_STAGE),
    "copies that normalise together": Case(
        partial(chain, nn.BatchNorm1d),
        CHAIN2,
        Schedule(kind="1f1b", microbatches=2),
        rows=24,
        mesh=DATA_BY_STAGE,
        sync_bn=True,
    ),
    "copies of glue": Case(Glued, GLUED4, ZERO_V, rows=16, mesh=DATA_BY_STAGE),
    "four stages": Case(Glued, GLUED4, F1B1, mesh=FOUR_STAGES),
    "four stages, zero bubble": Case(chain, CHAIN4, ZERO, mesh=FOUR_STAGES),
}
