"""Operators that collectives of sharded layers start, which selective recomputation watches, are as many as priced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx as px
from phalanx.auto.capture.layers import LayerStrategy
from phalanx.auto.cost.layer_strategy import collective_operators
from phalanx.diagnose.calibrate.layers import OperatorCounter
from phalanx.parallel.session import session
from ranks import run_ranks

pytestmark = pytest.mark.dist

WIDTH = 16

STYLES: dict[str, tuple[dict[str, Any], str, dict[str, LayerStrategy]]] = {
    "column, whole output": ({"1": "column"}, "model", {"1": LayerStrategy("column")}),
    "row, whole input": ({"1": "row"}, "model", {"1": LayerStrategy("row")}),
    "column for a row": (
        {"1": "column", "3": "row"},
        "model",
        {"1": LayerStrategy("column", output_state="features"), "3": LayerStrategy("row", input_state="features")},
    ),
    "vocab": ({"0": "vocab"}, "model", {"0": LayerStrategy("vocab")}),
    "column, samples gathered": ({"1": "column"}, "data", {"1": LayerStrategy("column")}),
    "row, samples gathered": ({"1": "row"}, "data", {"1": LayerStrategy("row")}),
}
"""Styles of layers, the mesh axis whose ranks hold them, and what a planner calls that."""


def operators_of(model: nn.Sequential, ids: Tensor) -> list[int]:
    """Return how many operators each layer starts in a forward pass."""
    counts, x = [], ids
    for layer in model:
        with OperatorCounter() as mode:
            x = layer(x)
        counts.append(mode.count)
    return counts


def more_operators() -> dict[str, dict[str, int]]:
    """Return how many more operators each sharded layer starts than the same one on its own."""
    px.init()
    size, ids = px.current().world_size, torch.arange(24).reshape(6, 4)
    more = {}
    for name, (styles, axis, priced) in STYLES.items():
        model = nn.Sequential(
            nn.Embedding(24, WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()
        )
        before = operators_of(model, ids)
        px.shard(model, styles, axis=axis, size=size if axis == "model" else None)
        model, *_ = px.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        after = operators_of(model, ids)
        more[name] = {at: after[int(at)] - before[int(at)] for at in priced}
        session.reset()
    return more


@pytest.mark.parametrize("ranks", [2, 4])
def test_operators_of_sharded_layers_are_as_many_as_priced(ranks: int) -> None:
    for more in run_ranks(more_operators, ranks):
        for name, (_, axis, priced) in STYLES.items():
            expected = {
                at: collective_operators(strategy, ranks, gathers_samples=axis == "data")
                for at, strategy in priced.items()
            }
            assert more[name] == expected, name
