"""Random combinations of settings, loaders, loops and losses: equal to one process, or refused by name.

A case that fails is reduced, choice by choice, to the plainest that fails still, and printed: `check(Case(...))` runs
it again. The seed is fixed; PHALANX_TEST_SEED draws other cases.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

import phalanx as px
from phalanx.comm import context
from phalanx.comm.batch.batches import Batches
from phalanx.comm.batch.passes import Passes
from phalanx.errors import PhalanxError
from phalanx.parallel.session import session
from ranks import run_ranks

pytestmark = pytest.mark.dist

CASES = 200
CASES_A_LAUNCH = 60
SEED = int(os.environ.get("PHALANX_TEST_SEED", "7"))
BATCH = 4
RATE = 0.1

SETTINGS: dict[str, dict[str, Any]] = {
    "sharding_1": {"sharding": True, "sharding_configs": {"stage": 1}},
    "sharding_2": {"sharding": True, "sharding_configs": {"stage": 2}},
    "sharding_3": {"sharding": True, "sharding_configs": {"stage": 3}},
    "gradient_merge": {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}},
    "localsgd": {"localsgd": True, "localsgd_configs": {"k_steps": 1}},
    "recompute": {"recompute": True, "recompute_configs": {"checkpoints": ["first"]}},
    "clip": {"clip": True, "clip_configs": {"norm": 0.05}},
    "ema": {"ema": True, "ema_configs": {"decay": 0.5}},
    "unfused": {"fuse_all_reduce_ops": False},
    "sum": {"gradient_scale_configs": {"scale_strategy": "sum"}},
}
"""What a strategy sets; none changes what one process computes but clip, gradient_merge and sum, as in `update`."""

DATA = ("tensors", "dataset", "loader", "batch_sampler", "dictionary")
LOOPS = ("textbook", "prefetch", "list", "open_validation", "zip", "train_step", "model")
STEPS = ("train_step", "model")
"""Loops in which the loss is an object that we are given."""

LOSSES = ("mean", "two_terms", "twice", "method", "dataclass", "nested", "tokens", "class_weights", "padding")


@dataclass(frozen=True)
class Case:
    """One script; the first value of each choice is the plainest."""

    settings: tuple[str, ...] = ()
    data: str = "tensors"
    loop: str = "textbook"
    loss: str = "mean"
    rows: int = 8
    ranks: int = 2
    normalises: bool = False
    """Whether the script changes its batch before the model sees it."""


def draw(number: random.Random) -> Case:
    """Return a case of which every two settings go together."""
    while True:
        settings = tuple(sorted(number.sample(list(SETTINGS), number.choice([0, 1, 1, 2, 3]))))
        case = Case(
            settings,
            number.choice(DATA),
            number.choice(LOOPS),
            number.choice(LOSSES),
            number.choice([5, 6, 7, 8, 9, 11]),
            number.choice([2, 3]),
            number.random() < 0.25,
        )
        if is_script(case):
            return case


def is_script(case: Case) -> bool:
    """Return whether a person would write this: its parts do not contradict each other."""
    if sum(name.startswith("sharding") for name in case.settings) > 1:
        return False
    if "localsgd" in case.settings and "clip" in case.settings:  # clips what one rank computes, as it should
        return False
    if "sum" in case.settings and case.loss in ("tokens", "class_weights", "padding") and case.loop not in STEPS:
        return False
    if case.loop == "zip" and case.data in ("loader", "batch_sampler", "dictionary"):
        return False
    # Torch's fully_shard wants the first call to be of the whole model, and says so.
    if case.loop == "zip" and case.loss == "method" and any(name.startswith("sharding") for name in case.settings):
        return False
    if case.loop in STEPS and case.loss not in ("mean", "class_weights", "padding"):
        return False
    return not (case.loop == "model" and (case.normalises or case.data == "dictionary"))


# --- the script -----------------------------------------------------------------------------------------------------


@dataclass
class Output:
    """What some models return: no pytree."""

    logits: Tensor


class Net(nn.Module):
    """Two layers, with the other ways in that models have."""

    def __init__(self, *, boxed: bool) -> None:
        super().__init__()
        self.first, self.last, self.boxed = nn.Linear(6, 6), nn.Linear(6, 3), boxed

    def forward(self, x: Tensor) -> Any:
        logits = self.last(torch.tanh(self.first(x)))
        return Output(logits) if self.boxed else logits

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(torch.tanh(self.first(x))), y)


def build(case: Case) -> Net:
    torch.manual_seed(0)
    return Net(boxed=case.loss == "dataclass").double()


def samples(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (rows,), generator=generator)


def logits_of(output: Any) -> Tensor:
    return output.logits if isinstance(output, Output) else output


def weights_of(loss: str, y: Tensor) -> Tensor:
    """Return what each label weighs in the mean; padding is label 0, and weighs nothing."""
    table = {"class_weights": [0.5, 1.0, 3.0], "padding": [0.0, 1.0, 1.0]}.get(loss, [1.0, 1.0, 1.0])
    return torch.tensor(table, dtype=torch.float64)[y]


def loss_of(case: Case, model: Net, x: Tensor, y: Tensor, mean: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return the loss of a batch; `mean` divides a sum by the weight of all ranks' samples."""
    reduction = "sum" if "sum" in case.settings else "mean"
    if case.loss == "method" and reduction == "mean":
        return model.loss(x, y)
    logits = logits_of(model(x))
    if case.loss in ("tokens", "class_weights", "padding"):
        weight = weights_of(case.loss, y)
        return mean((F.cross_entropy(logits, y, reduction="none") * weight).sum(), weight.sum())
    loss = F.cross_entropy(logits, y, reduction=reduction)
    if case.loss == "two_terms":
        loss = loss + 0.1 * getattr(logits.pow(2).sum(1), reduction)()
    if case.loss == "twice":
        loss = loss + F.cross_entropy(model(-x), y, reduction=reduction)
    if case.loss == "nested":
        loss = loss + F.cross_entropy(model(torch.cat([logits, logits], 1)), y, reduction=reduction)
    return loss


def loss_module(case: Case) -> Callable[[Any, Tensor], Tensor]:
    """Return the loss as scripts hand it to `px.train_step` and `px.Model`."""
    reduction = "sum" if "sum" in case.settings else "mean"
    if case.loss == "class_weights":
        return nn.CrossEntropyLoss(torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64), reduction=reduction)
    if case.loss == "padding":
        return nn.CrossEntropyLoss(ignore_index=0, reduction=reduction)
    return nn.CrossEntropyLoss(reduction=reduction)


def data_of(case: Case) -> Any:
    x, y = samples(case.rows, 1)
    dataset = TensorDataset(x, y)
    if case.data == "tensors":
        return x, y
    if case.data == "loader":
        return DataLoader(dataset, batch_size=BATCH)
    if case.data == "batch_sampler":
        return DataLoader(dataset, batch_sampler=BatchSampler(SequentialSampler(dataset), BATCH, drop_last=False))
    if case.data == "dictionary":
        return [{"x": x[i], "y": y[i]} for i in range(case.rows)]
    return dataset


def batches(case: Case, loader: Any) -> Iterator[tuple[Tensor, ...]]:
    """Yield what a loop trains on, in the way that it reads its loaders."""
    if case.loop == "prefetch":
        source = iter(loader)
        following = next(source, None)
        while following is not None:
            batch, following = following, next(source, None)
            yield batch
    elif case.loop == "list":
        yield from list(loader)
    elif case.loop == "open_validation":
        held = iter(px.data.ShardedLoader(samples(5, 2), global_batch=BATCH, shuffle=False, training=False))
        for batch in loader:
            next(held, None)
            yield batch
    elif case.loop == "zip":
        yield from zip(loader, px.data.ShardedLoader(samples(6, 3), global_batch=BATCH, shuffle=False), strict=False)
    else:
        yield from loader


def parts(batch: Any) -> tuple[Tensor, Tensor]:
    return (batch["x"], batch["y"]) if isinstance(batch, dict) else (batch[0], batch[1])


def train(case: Case) -> dict[str, Tensor]:
    """Train as the case says; return the full parameters."""
    settings: dict[str, Any] = {}
    for name in case.settings:
        settings |= SETTINGS[name]
    if "sum" in case.settings and "gradient_merge" in case.settings:
        settings["gradient_merge_configs"] = {"k_steps": 2, "avg": False}
    strategy, model = px.DistributedStrategy(**settings), build(case)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    # A DataLoader's size is per rank.
    sizes = {} if case.data in ("loader", "batch_sampler") else {"global_batch": BATCH}
    if case.loop == "model":
        px.Model(model, loss_module(case), optimizer, strategy=strategy).train(1, data_of(case), shuffle=False, **sizes)
    else:
        distributed = px.distribute(model, optimizer, data_of(case), strategy=strategy, shuffle=False, **sizes)
        run_loop(case, *distributed)
    with torch.no_grad():
        return {n: p.full_tensor() if hasattr(p, "full_tensor") else p.clone() for n, p in model.named_parameters()}


def run_loop(case: Case, model: Net, optimizer: torch.optim.Optimizer, loader: Any) -> None:
    step = px.train_step(model, loss_module(case), optimizer) if case.loop == "train_step" else None
    for batch in batches(case, loader):
        first, second = batch if case.loop == "zip" else (batch, None)
        x, y = parts(first)
        x = x * 1.0 if case.normalises else x
        if step is not None:
            step(x, y)
            continue
        loss = loss_of(case, model, x, y, px.weighted_mean)
        if second is not None:
            loss = loss + F.cross_entropy(logits_of(model(second[0])), second[1], reduction=reduction_of(case))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def reduction_of(case: Case) -> str:
    return "sum" if "sum" in case.settings else "mean"


def train_all(todo: list[Case]) -> list[dict[str, Tensor] | str]:
    """Run on the ranks: each case's parameters, or why it was refused."""
    px.init()
    results: list[dict[str, Tensor] | str] = []
    for case in todo:
        try:
            results.append(train(case))
        except PhalanxError as error:
            results.append(f"{type(error).__name__}: {error}")
        forget()
    return results


def forget() -> None:
    """Leave nothing of a case to the next; one that was refused halfway leaves a graph that holds its model."""
    session.reset()
    here = context.current()
    here.batches = Batches()
    here.passes = Passes(here.batches)
    gc.collect()


# --- one process ----------------------------------------------------------------------------------------------------


def reference(case: Case) -> dict[str, Tensor]:
    """Train on the global batches in one process, with torch alone."""
    model = build(case)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    merged = 2 if "gradient_merge" in case.settings else 1
    gradients: list[tuple[int, tuple[Tensor, ...]]] = []
    for rows, loss in losses(case, model):
        gradients.append((rows, torch.autograd.grad(loss, list(model.parameters()))))
        if len(gradients) == merged:
            update(case, model, optimizer, gradients)
            gradients = []
    return {name: param.detach() for name, param in model.named_parameters()}


def losses(case: Case, model: Net) -> Iterator[tuple[int, Tensor]]:
    """Yield samples and loss of each global batch."""
    size = BATCH * case.ranks if case.data in ("loader", "batch_sampler") else BATCH
    (x, y), second = samples(case.rows, 1), None
    for start in range(0, case.rows, size):
        own, labels = x[start : start + size], y[start : start + size]
        if case.loop in ("train_step", "model"):
            loss = loss_module(case)(logits_of(model(own)), labels)
        else:
            loss = loss_of(case, model, own, labels, lambda total, weight: total / weight)
        if case.loop == "zip":
            index = start // size * BATCH
            second = tuple(column[index : index + BATCH] for column in samples(6, 3))
            if not len(second[0]):
                return
            loss = loss + F.cross_entropy(logits_of(model(second[0])), second[1], reduction=reduction_of(case))
        yield len(own), loss


@torch.no_grad()
def update(
    case: Case, model: Net, optimizer: torch.optim.Optimizer, gradients: list[tuple[int, tuple[Tensor, ...]]]
) -> None:
    total = 1.0 if "sum" in case.settings else float(sum(rows for rows, _ in gradients))
    for index, param in enumerate(model.parameters()):
        param.grad = sum(g[index] * (1.0 if "sum" in case.settings else rows) for rows, g in gradients) / total
    if "clip" in case.settings:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()


# --- compared -------------------------------------------------------------------------------------------------------


def run(todo: list[Case]) -> dict[Case, list[Any]]:
    """Return what each rank has of each case; a launch that dies is divided until the case that did it is alone."""
    if not todo:
        return {}
    if len(todo) > CASES_A_LAUNCH:
        return run(todo[:CASES_A_LAUNCH]) | run(todo[CASES_A_LAUNCH:])
    try:
        results = run_ranks(train_all, todo[0].ranks, todo, timeout_s=20 + len(todo))
    except AssertionError as error:
        if len(todo) == 1:
            return {todo[0]: [f"died: {error}"]}
        half = len(todo) // 2
        return run(todo[:half]) | run(todo[half:])
    return {case: list(found) for case, found in zip(todo, zip(*results, strict=True), strict=True)}


def fault(case: Case, found: list[Any]) -> str | None:
    """Return what is wrong with a case; None if all ranks equal one process, or all refused."""
    if any(isinstance(one, str) for one in found):
        is_refused = all(isinstance(one, str) and not one.startswith("died") for one in found)
        return None if is_refused else str(found)[-2000:]
    expected = reference(case)
    off = max(((one[n] - p).norm() / p.norm()).item() for one in found for n, p in expected.items())
    return None if off < 1e-9 else f"parameters are off by {off:.1e}"


def reduced(case: Case) -> Case:
    """Return the plainest case that fails as this one does."""
    plain = Case(ranks=case.ranks)
    while True:
        simpler = [
            dataclasses.replace(case, settings=tuple(s for s in case.settings if s != name)) for name in case.settings
        ]
        simpler += [
            dataclasses.replace(case, **{field.name: getattr(plain, field.name)})
            for field in dataclasses.fields(Case)
            if field.name not in ("settings", "ranks") and getattr(case, field.name) != getattr(plain, field.name)
        ]
        failing = next((one for one, found in run(simpler).items() if fault(one, found) is not None), None)
        if failing is None:
            return case
        case = failing


def check(*todo: Case) -> tuple[int, int]:
    """Raise if a case is neither equal to one process nor refused; return how many were equal, and refused."""
    found: dict[Case, list[Any]] = {}
    for ranks in sorted({case.ranks for case in todo}):
        found |= run([case for case in todo if case.ranks == ranks])
    faults = {case: why for case in todo if (why := fault(case, found[case])) is not None}
    if faults:
        lines = [f"{case}: {why}" for case, why in faults.items()]
        first = reduced(next(iter(faults)))
        raise AssertionError(f"{len(faults)} cases, seed {SEED}; the first reduced: {first}\n" + "\n".join(lines))
    refused = [case for case in todo if isinstance(found[case][0], str)]
    return len(todo) - len(refused), len(refused)


def drawn(count: int) -> Iterable[Case]:
    number = random.Random(SEED)
    return dict.fromkeys(draw(number) for _ in range(count))


@pytest.mark.timeout(400)
def test_random_combinations_equal_one_process_or_are_refused() -> None:
    equal, refused = check(*drawn(CASES))
    assert equal > 2 * refused
