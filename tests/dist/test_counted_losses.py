"""Means over tokens, class weights and sums, on any number of ranks, against one process over the whole batch."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as px
from phalanx.errors import ConfigError
from ranks import run_ranks

pytestmark = pytest.mark.dist

GLOBAL = 4
CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)

Loss = Callable[[Tensor, Tensor], Tensor]


def rows(count: int = 7) -> tuple[Tensor, Tensor]:
    """Sequences of 6 tokens, most of them padded: all of the last."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 6, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (count, 6), generator=generator)
    for row in range(count):
        y[row, (row * 5) % 6 :] = -100
    return x, y


class Rows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, *columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> Any:
        return tuple(column[index] for column in self.columns)


def net() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    return model, copy.deepcopy(model)


class Classes(nn.Module):
    """The same with classes along dim 1, as torch's losses take them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).movedim(-1, 1)


def off(model: nn.Module, reference: nn.Module) -> float:
    def whole(param: Tensor) -> Tensor:
        return (param.full_tensor() if hasattr(param, "full_tensor") else param).detach()

    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(((whole(p) - r).norm() / r.norm()).item() for p, r in pairs)


def tokens(model: nn.Module, x: Tensor, y: Tensor, share: bool) -> Tensor:
    out = model(x).flatten(0, 1)
    if not share:
        return F.cross_entropy(out, y.flatten())
    return px.weighted_mean(F.cross_entropy(out, y.flatten(), reduction="sum"), (y != -100).sum())


def classes(model: nn.Module, x: Tensor, y: Tensor, share: bool) -> Tensor:
    """With another term, a mean over rows."""
    out, penalty = model(x), model(x).pow(2).mean()
    y = y.clamp(min=0)
    if not share:
        return F.cross_entropy(out.flatten(0, 1), y.flatten(), CLASS_WEIGHTS) + penalty
    total = F.cross_entropy(out.flatten(0, 1), y.flatten(), CLASS_WEIGHTS, reduction="sum")
    return px.weighted_mean(total, CLASS_WEIGHTS[y].sum()) + penalty


def loops(stage: int) -> dict[str, float]:
    found = {}
    for loss in (tokens, classes):
        for ahead in (False, True):
            model, reference = net()
            optimizer, plain = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, reference))
            settings = {"sharding": True, "sharding_configs": {"stage": stage}} if stage else {}
            strategy = px.DistributedStrategy(**settings)
            loader = px.distribute(
                model, optimizer, Rows(*rows()), global_batch=GLOBAL, shuffle=False, strategy=strategy
            )
            values = []
            for x, y in list(loader[2]) if ahead else loader[2]:
                value = loss(model, x, y, share=True)
                value.backward()
                optimizer.step()
                optimizer.zero_grad()
                values.append(value.item())
            for at, (x, y) in enumerate(zip(*(column.split(GLOBAL) for column in rows()), strict=True)):
                value = loss(reference, x, y, share=False)
                value.backward()
                plain.step()
                plain.zero_grad()
                found[f"{loss.__name__} {stage} {ahead}, value {at}"] = abs(values[at] - value.item()) * (
                    loss is tokens
                )
            found[f"{loss.__name__} {stage} {ahead}"] = off(model, reference)
            del model, optimizer, loader
            gc.collect()
            gc.collect()
    return found


def accumulated() -> float:
    """Two batches, one update: the mean over the tokens of both."""
    model, reference = net()
    loader = px.distribute(
        model, None, Rows(*rows()), global_batch=GLOBAL, shuffle=False, strategy=px.DistributedStrategy()
    )[2]
    batches = list(loader)
    weight = sum((y != -100).sum() for (_, y), share in zip(batches, shares(), strict=True) if share)
    for at, (x, y) in enumerate(batches):
        block = px.no_sync(model) if at == 0 else torch.enable_grad()
        with block:
            out = model(x).flatten(0, 1)
            px.weighted_mean(F.cross_entropy(out, y.flatten(), reduction="sum"), weight).backward()
    x, y = rows()
    F.cross_entropy(reference(x).flatten(0, 1), y.flatten()).backward()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(((p.grad - r.grad).norm() / r.grad.norm()).item() for p, r in pairs)


def shares() -> list[int]:
    """Return the rows of this rank in the two batches of 4 and 3 rows."""
    rank, ranks = px.current().rank, px.current().world_size
    return [size // ranks + (rank < size % ranks) for size in (4, 3)]


STEPS: dict[str, Loss] = {
    "padding": nn.CrossEntropyLoss(),
    "class weights": nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, label_smoothing=0.1),
    "function": F.cross_entropy,
}


def steps(kind: str) -> dict[str, float]:
    """`px.Model` and `px.train_step` with a torch loss of classes."""
    found = {}
    for name, loss_fn in STEPS.items():
        model, reference = (Classes(m) for m in net())
        optimizer, plain = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, reference))
        options: dict[str, Any] = {"global_batch": GLOBAL, "shuffle": False}
        if kind == "Model":
            px.Model(model, loss_fn, optimizer, strategy=px.DistributedStrategy()).train(1, Rows(*rows()), **options)
        else:
            strategy = px.DistributedStrategy(graph=kind == "compiled")
            loader = px.distribute(model, optimizer, Rows(*rows()), strategy=strategy, **options)[2]
            step = px.train_step(model, loss_fn, optimizer)
            for x, y in loader:
                step(x, y)
            del step, loader
        for x, y in zip(*(column.split(GLOBAL) for column in rows()), strict=True):
            loss_fn(reference(x), y).backward()
            plain.step()
            plain.zero_grad()
        found[f"{kind}, {name}"] = off(model, reference)
        del model, optimizer
        gc.collect()
        gc.collect()
    return found


def all_of(stages: tuple[int, ...], kinds: tuple[str, ...]) -> dict[str, float]:
    px.init()
    found: dict[str, float] = {}
    for stage in stages:
        found |= loops(stage)
    for kind in kinds:
        found |= steps(kind)
    found["accumulated"] = accumulated()
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_means_over_tokens_and_class_weights_are_those_of_one_process(ranks: int) -> None:
    for found in run_ranks(all_of, ranks, (0, 2) if ranks > 1 else (0,), ("step", "Model"), timeout_s=110):
        assert {name: value for name, value in found.items() if not value < 1e-12} == {}


def staged() -> float:
    px.init()
    model, reference = (Classes(m) for m in net())
    optimizer, plain = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, reference))
    strategy = px.DistributedStrategy(
        pipeline=True, pipeline_configs={"accumulate_steps": 2}, hybrid_configs={"pp_degree": 2}
    )
    flat = nn.Sequential(*model.inner, Moved())
    loader = px.distribute(flat, optimizer, Rows(*rows(8)), global_batch=4, shuffle=False, strategy=strategy)[2]
    step = px.train_step(flat, nn.CrossEntropyLoss(), optimizer)
    for x, y in loader:
        step(x, y)
    for x, y in zip(*(column.split(4) for column in rows(8)), strict=True):
        F.cross_entropy(reference(x), y).backward()
        plain.step()
        plain.zero_grad()
    mine = [(p, r) for p, r in zip(flat.parameters(), reference.parameters(), strict=True) if not p.is_meta]
    return max(((p - r).norm() / r.norm()).item() for p, r in mine)


class Moved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.movedim(-1, 1)


def test_stages_take_the_mean_over_the_tokens_of_all_micro_batches() -> None:
    assert max(run_ranks(staged, 2, timeout_s=110)) < 1e-12


def refused() -> list[str]:
    px.init()
    found = []
    x, y = rows()
    model = Classes(net()[0])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trained = px.Model(model, nn.CrossEntropyLoss(reduction="sum"), optimizer)
    for wrong in (
        lambda: trained.train(1, (x, y), global_batch=GLOBAL),
        lambda: px.weighted_mean(torch.ones(3), 1),
        lambda: px.weighted_mean(torch.ones(()), 0),
    ):
        try:
            wrong()
        except ConfigError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_sum_over_rows_and_a_mean_over_nothing_are_refused(ranks: int) -> None:
    for summed, shape, nothing in run_ranks(refused, ranks):
        assert 'CrossEntropyLoss with reduction="sum" sums over rows' in summed
        assert "found shape (3,)" in shape
        assert "a weight of 0 on all ranks" in nothing
