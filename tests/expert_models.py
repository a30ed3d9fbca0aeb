"""Mixtures of experts in plain torch, for tests of expert parallel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 6


class Experts(nn.Module):
    """The feed-forward layers of all experts, stacked."""

    def __init__(self, count: int, width: int = WIDTH, inner: int = 5) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, inner, width) * width**-0.5)
        self.bias = nn.Parameter(torch.randn(count, inner) * 0.1)
        self.down = nn.Parameter(torch.randn(count, width, inner) * inner**-0.5)

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(tokens)
        for expert in range(len(self.up)):
            row, slot = (chosen == expert).nonzero(as_tuple=True)
            hidden = F.gelu(F.linear(tokens[row], self.up[expert], self.bias[expert]))
            output = F.linear(hidden, self.down[expert]) * weights[row, slot, None]
            result = result.index_add(0, row, output.to(result.dtype))
        return result


class Mixture(nn.Module):
    """A router and its experts, with a residual.

    Args:
        count: Experts.
        k: Experts of each token.
        favourites: Experts that the router prefers by far, all tokens alike.
        width: Of tokens.
        inner: Of what experts compute in between.
    """

    def __init__(
        self, count: int, k: int, favourites: tuple[int, ...] = (), width: int = WIDTH, inner: int = 5
    ) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = Experts(count, width, inner)
        self.k = k
        with torch.no_grad():
            self.router.bias[list(favourites)] += 20.0

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).softmax(-1).topk(self.k)
        return x + self.experts(tokens, chosen, weights).view_as(x)


def mixture(count: int = 4, k: int = 2, favourites: tuple[int, ...] = ()) -> nn.Module:
    """Return a model with two mixtures, one behind the other."""
    return nn.Sequential(
        nn.Linear(6, WIDTH), Mixture(count, k, favourites), nn.Tanh(), Mixture(count, k), nn.Linear(WIDTH, 5)
    )
