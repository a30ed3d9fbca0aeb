"""Gradients that float16 on the wire cannot hold are an error that names them, and others travel as they are."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import phalanx as px
from phalanx.errors import ConfigError
from ranks import run_ranks

pytestmark = pytest.mark.dist


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Parameter(torch.ones(3))
        self.large = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.small.sum() * x + self.large[2] * x * 1000


def _trained(values: list[float]) -> tuple[str, float]:
    """Return the error of a backward pass, or else the gradient of the large parameter."""
    rank = px.init().rank
    model = Two()
    strategy = px.DistributedStrategy()
    strategy.fp16_allreduce = True
    px.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy)
    try:
        model(torch.tensor(values[rank])).backward()
    except ConfigError as error:
        return str(error), 0.0
    assert model.large.grad is not None
    return "", float(model.large.grad[2])


def _all() -> list[tuple[str, float]]:
    # A mean that fits; a sum of means that does not, on both ranks or on one; one that was infinite before.
    return [_trained(values) for values in ([40.0, 20.0], [80.0, 70.0], [500.0, 1.0], [math.inf, 1.0])]


def test_a_sum_beyond_float16_is_an_error_that_names_the_parameter_on_all_ranks() -> None:
    first, second = run_ranks(_all, 2)
    assert first == second
    fits, beyond, on_one, infinite = first
    assert fits == ("", 30_000.0)
    assert beyond[0] == on_one[0]
    assert beyond[0].startswith(
        "the gradient of 'large', added up over the ranks in float16 (fp16_allreduce), is above"
    )
    assert "65504" in beyond[0]
    assert "Set strategy.fp16_allreduce = False" in beyond[0]
    assert infinite == ("", math.inf)
