"""Gradients of parameters that several operators use: one for each use, added up two at a time, besides their sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as px
from phalanx.auto.capture.module_calls import ModuleCall, list_module_calls
from phalanx.auto.capture.step import capture
from phalanx.auto.planner.report.result import PlanResult

WIDTH = 64
SIZE = WIDTH * WIDTH * 4
"""Bytes of a weight."""


class Stack(nn.Module):
    """Linear layers without bias, one after the other."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """Return what comes out, of the shape of `x`."""
        for layer in self.layers:
            x = layer(x)
        return x


class Loop(nn.Module):
    """One weight, used several times inside one module."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight, self.count = nn.Parameter(torch.zeros(WIDTH, WIDTH)), count

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.count):
            x = torch.tanh(F.linear(x, self.weight))
        return x


class Logged(Stack):
    """Reads the norms of all weights at the end, of which nobody needs a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        with torch.no_grad():
            self.norm = torch.stack([param.norm() for param in self.parameters()]).norm()
        return x


class Residual(nn.Module):
    """A learned input of the shape of the activations, before two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.zeros(1, WIDTH))
        self.first, self.second = (nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.start
        return x + self.first(torch.tanh(x)) + self.second(x)


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        grad = grads[0].clone()
        torch._foreach_mul_([grad], 0.5)  # writes in place, and returns nothing
        return grad


class Halved(nn.Module):
    """Uses a weight twice, through a gradient that is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        halve: Callable[[Tensor], Tensor] = _Halved.apply
        return torch.tanh(x @ halve(self.weight)) @ halve(self.weight)


def _sample(rows: int = 2) -> tuple[Tensor, Tensor]:
    return torch.zeros(rows, WIDTH), torch.zeros(rows, WIDTH)


def _answer(model: nn.Module) -> PlanResult:
    return px.auto_parallel(model, _sample(), F.mse_loss, cluster="cpux1", optimizer="sgd")


def _shared(model: nn.Module) -> list[float]:
    return [work.shared_grad_bytes for work in _answer(model).work.all]


def _calls(model: nn.Module, rows: int) -> list[ModuleCall]:
    return list_module_calls(capture(model, _sample(rows), F.mse_loss))


@pytest.mark.parametrize("count", [2, 4])
def test_uses_inside_one_module_count_each(count: int) -> None:
    # The sum so far, the gradient of a use, and their sum, which is the parameter's own gradient in the end.
    assert _shared(Loop(count)) == [2 * SIZE, 0]
    assert _shared(Loop(1)) == [0, 0]


def test_a_weight_that_is_read_without_a_gradient_is_not_used_by_it() -> None:
    assert not any(_shared(Logged(3)))
    assert _answer(Logged(3)).memory == pytest.approx(_answer(Stack(3)).memory, rel=0.01)


def test_gradients_of_activations_are_no_gradients_of_uses() -> None:
    # The gradient of what is learned is a sum of those of both branches and the shortcut: gradients of activations.
    assert not any(_shared(Residual()))
    by_path = {call.path: call.temporary_bytes for call in _calls(Residual(), rows=1)}
    assert by_path["first"] == 2 * WIDTH * 4  # what came from the other branch and the shortcut waits for its own


def test_a_gradient_that_is_changed_in_place_is_followed() -> None:
    assert _shared(Halved())[0] == 2 * SIZE
