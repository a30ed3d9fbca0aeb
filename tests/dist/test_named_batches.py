"""Columns that have names come to the parameters of these names on several ranks: in stages, planned and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import phalanx as px
from phalanx.parallel.session import applied_to
from phalanx.train.callbacks.run import Run
from ranks import graphs_without_kernels, run_ranks

pytestmark = pytest.mark.dist

ROWS = 16


class Tokens(nn.Module):
    """Each of its inputs counts for something else; two layers, so that there may be two stages."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 3)

    def forward(self, ids: Tensor, mask: Tensor, segments: Tensor) -> Tensor:
        scores: Tensor = self.second(torch.tanh(self.first(ids * mask)))
        return scores + segments


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of dictionaries whose order is not that of the parameters."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {name: column[row] for name, column in columns().items()}


def columns() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "segments": torch.rand(ROWS, 3, generator=generator),
        "labels": torch.randint(3, (ROWS,), generator=generator),
        "mask": torch.randint(2, (ROWS, 4), generator=generator).float(),
        "ids": torch.randn(ROWS, 4, generator=generator),
    }


class Losses(px.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_end(self, run: Run) -> None:
        self.seen.append(run.global_loss())


WAYS = ("data parallel", "stages", "AUTO_PARALLEL", "compiled")


def trained() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for way in WAYS:
        losses, net = Losses(), Tokens()
        model = px.Model(net, F.cross_entropy, torch.optim.SGD(net.parameters(), 0.5), ["acc1"], **options(way))
        with graphs_without_kernels():  # names are a matter of the graph
            model.train(2, Rows(), [losses], global_batch=8, shuffle=False)
            evaluated = model.eval(Rows(), batch_size=4)
            predicted = model.predict(Rows(), batch_size=4)
        found[way] = [*losses.seen, evaluated["loss"], predicted.sum().item()]
        made = applied_to(net)
        assert made is not None
        found[f"{way}: stages"] = made.pipeline is not None
        del model, net, made
    return found


def options(way: str) -> dict[str, Any]:
    if way == "stages":
        strategy = px.DistributedStrategy(pipeline=True, pipeline_configs={"accumulate_steps": 2})
        strategy.hybrid_configs = {"pp_degree": 2}
        return {"strategy": strategy}
    return {"AUTO_PARALLEL": {"parallel_mode": "auto_parallel"}, "compiled": {"compiled": True}}.get(way, {})


def test_every_way_to_train_reads_columns_by_name() -> None:
    expected = trained_by_hand()
    for found in run_ranks(trained, 2, timeout_s=110.0):
        for way in WAYS:
            assert found[way] == pytest.approx(expected, rel=1e-5), way
            assert found[f"{way}: stages"] == (way == "stages")


def trained_by_hand() -> list[float]:
    net, of = Tokens(), columns()
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    label = of.pop("labels")
    losses = []
    for _ in range(2):
        for rows in (slice(0, 8), slice(8, 16)):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(**{name: part[rows] for name, part in of.items()}), label[rows])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    with torch.no_grad():
        outputs = net(**of)
        return [*losses, F.cross_entropy(outputs, label).item(), outputs.sum().item()]
