"""`train_small`: train the small models of `benchmarks.published_models` under Plans, as one rank or as one process.

Run by `phalanx run` it is a part of `benchmarks.bench_models --apply`: one process plans and trains alone, ranks train
under its Plans, and rank 0 writes what it has.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import phalanx as px
from benchmarks.published_models import PUBLISHED, build_small, import_foreign
from phalanx.auto.planner.report.result import PlanResult
from phalanx.parallel.session import applied_to, session
from phalanx.plan.value import OnRanks, Plan, Shard
from phalanx.strategy import DistributedStrategy

ROWS, STEPS, RATE = 8, 3, 0.05
"""Samples of a global batch, and updates."""


class NamedRows(Dataset[dict[str, Tensor]]):
    """Samples that are dictionaries."""

    def __init__(self, columns: dict[str, Tensor]) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {name: column[row] for name, column in self._columns.items()}


def strategy() -> DistributedStrategy:
    """Return what one process and ranks need to have the same results: batch normalisation over all of them."""
    return DistributedStrategy(sync_batch_norm=True)


def sample(name: str) -> Any:
    """Return a global batch of a small model."""
    return PUBLISHED[name].columns(ROWS, True)


class Trained(NamedTuple):
    """A small model after a few updates."""

    losses: list[float]
    """Before each of them, of the global batch."""

    params: dict[str, Tensor]
    """By name, each whole."""


def train_small(name: str, plan: Plan | None = None) -> Trained:
    """Train a small model for a few updates. Collective.

    Args:
        name: Of the model.
        plan: For the ranks of this job; None for one process.
    """
    published, model = PUBLISHED[name], build_small(name)
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
    columns = published.columns(ROWS * STEPS, True)
    rows = NamedRows(columns) if isinstance(columns, dict) else TensorDataset(*columns)
    model, optimizer, loader = px.distribute(
        model,
        optimizer,
        rows,
        global_batch=ROWS,
        shuffle=False,
        plan=plan,
        strategy=strategy() if plan is None else None,
    )
    step = px.train_step(model, published.loss, optimizer)
    losses = [px.global_mean(step(batch).loss).item() for batch in loader]
    trained = Trained(losses, _gather_stages(dict(_list_whole(model))))
    del model, optimizer, loader, step
    session.reset()
    gc.collect()  # the next Plan is another job
    return trained


def largest_difference(trained: Trained, expected: Trained) -> tuple[float, float]:
    """Return the largest difference of a loss, and of a parameter, relative to its norm."""
    params = expected.params
    assert set(trained.params) == set(params), set(trained.params) ^ set(params)
    assert len(trained.losses) == len(expected.losses)
    losses = (abs(loss / alone - 1) for loss, alone in zip(trained.losses, expected.losses, strict=True))
    whole = ((trained.params[name] - param).norm() / param.norm().clamp_min(1e-3) for name, param in params.items())
    return max(losses), max(difference.item() for difference in whole)


CUT = {
    "ResNet-50": ("tp=2",),
    "ViT-B/16": ("tp=2", "*.mlp.0=column"),
    "Swin-T": ("tp=2", "*.mlp.0=column"),
    "ConvNeXt-T": ("tp=2", "*.block.3=column"),
    "BERT-base": (
        "tp=2",
        *(f"*.self.{name}=column" for name in ("query", "key", "value")),
        "*.attention.output.dense=row",
        "*.intermediate.dense=column",
        "*.[01].output.dense=row",
    ),
    "GPT-2": ("tp=2", "*.h.*=parts"),
    "Llama-3-8B": (
        "tp=2",
        *("*.[qkv]_proj=column", "*.o_proj=row"),
        *("*.gate_proj=column", "*.up_proj=column", "*.down_proj=row"),
    ),
    "T5-base": ("tp=2", "*.wi=column", "*.wo=row"),
    "Mixtral-8x7B": ("ep=2",),
}
"""Limits under which ranks hold layers together: small models are faster whole. Of attention these are heads, of
convolutions parts of their operators, of mixtures experts."""

STAGED = ("ResNet-50", "Swin-T", "ConvNeXt-T")
"""Models whose forward passes run through their modules in order, so that they have stages."""


def limits_of(name: str, ranks: int) -> dict[str, tuple[str, ...]]:
    """Return the limits of the Plans that a model is trained under, by what the Plans are called."""
    cut = CUT[name]
    if name == "Mixtral-8x7B" and ranks == 4:  # two copies of the experts, and heads of attention apart
        cut = (*cut, "tp=2", "*.[qkv]_proj=column", "*.o_proj=row")
    return {"chosen": (), "cut": cut, "sharded": ("zero=3",)} | ({"stages": ("pp=2",)} if name in STAGED else {})


def plan_small(name: str, ranks: int, limits: tuple[str, ...]) -> PlanResult:
    """Return what the planner says of a small model for ranks on this processor."""
    options = {"optimizer": "momentum", "strategy": strategy(), "limits": limits, "top_k": 1}
    model, loss = build_small(name), PUBLISHED[name].loss
    return px.auto_parallel(model, sample(name), loss, cluster=f"cpux{ranks}", **options)


def _gather_stages(params: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return all parameters, those of other stages from their ranks. Collective where there are some."""
    if not any(param.is_meta for param in params.values()):
        return params
    several: list[Any] = [None] * px.current().world_size
    torch.distributed.all_gather_object(several, {name: p for name, p in params.items() if not p.is_meta})
    return {name: param for rank in several for name, param in rank.items()}


def _list_whole(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    applied = applied_to(model)
    for name, param in model.named_parameters():
        whole: Tensor = param.full_tensor() if hasattr(param, "full_tensor") else param
        place = applied.plan.rule_for(name).place if applied is not None else None
        if isinstance(place, OnRanks):
            for axis, placed in place.layout.items():
                if isinstance(placed, Shard):
                    whole = px.comm.all_gather(whole.detach(), placed.dim, axis=axis)
        yield name, whole.detach().clone()


ALONE, CASES, ROWS_OF = "alone.pt", "cases-{ranks}.pt", "rows-{ranks}.json"
"""Files by which the processes of a comparison pass on what they have."""


class Case(NamedTuple):
    """One Plan of one model."""

    model: str
    way: str
    """What of `limits_of` it keeps to."""

    layout: str
    """Its parallel config, and how many layers are cut."""

    plan: Plan


def plan_cases(names: Sequence[str], ranks: int) -> list[Case]:
    """Return a Plan for each model and way."""
    cases = []
    for name in names:
        for way, limits in limits_of(name, ranks).items():
            best = (answer := plan_small(name, ranks, limits)).search.best
            cut = f", {len(best.sharded_layers)} layers cut" if best.sharded_layers else ""
            cases.append(Case(name, way, f"{best.config}{cut}", answer.plan))
    return cases


def main() -> None:
    """Do the part of this number of ranks: `ALONE` and `CASES` are files of the folder that is the first argument."""
    folder, names = Path(sys.argv[1]), sys.argv[2].split(",")
    import_foreign()
    px.init()
    ranks = px.current().world_size
    if ranks == 1:
        torch.save({name: train_small(name) for name in names}, folder / ALONE)
        for several in map(int, sys.argv[3].split(",")):
            torch.save(plan_cases(names, several), folder / CASES.format(ranks=several))
        return
    alone = torch.load(folder / ALONE, weights_only=False)
    rows = []
    for case in torch.load(folder / CASES.format(ranks=ranks), weights_only=False):
        loss, params = largest_difference(train_small(case.model, case.plan), alone[case.model])
        rows.append(
            {"model": case.model, "ranks": ranks, "way": case.way, "plan": case.layout, "loss": loss, "params": params}
        )
    if px.current().rank == 0:
        (folder / ROWS_OF.format(ranks=ranks)).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
