"""`train_small`: train the small models of `benchmarks.published_models` under Plans, as one rank or as one process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import phalanx as px
from benchmarks.published_models import PUBLISHED, build_small
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


def train_small(name: str, plan: Plan | None = None) -> dict[str, Tensor]:
    """Return all parameters of a small model after a few updates. Collective.

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
    for batch in loader:
        step(batch)
    trained = dict(_list_whole(model))
    del model, optimizer, loader, step
    session.reset()
    gc.collect()  # the next Plan is another job
    return trained


def largest_difference(trained: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest difference of a parameter, relative to its norm."""
    assert set(trained) == set(expected), set(trained) ^ set(expected)
    return max(
        ((trained[name] - param).norm() / param.norm().clamp_min(1e-3)).item() for name, param in expected.items()
    )


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
