"""DLRM in torch (Naumov et al., arXiv:1906.00091): any module that pools the bags of a batch, under one network."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.parameter_server.bags import BOTTOM, TOP
from benchmarks.parameter_server.work import DIM, SLOTS


class Dlrm(nn.Module):
    """Logits of clicks, shape (n, 1).

    Args:
        bags: Returns the pooled rows of a batch's features, shape (n, 26 * dim).
    """

    def __init__(self, bags: nn.Module) -> None:
        super().__init__()
        self.bags = bags
        self.bottom = nn.Sequential(*_layers(BOTTOM))
        self.top = nn.Sequential(*_layers(TOP[:-1]), nn.Linear(*TOP[-2:]))
        self.register_buffer("pairs", torch.triu_indices(SLOTS + 1, SLOTS + 1, 1), persistent=False)

    def forward(self, features: Any, dense: Tensor) -> Tensor:
        """Return the logits of bags, as `bags` takes them, and dense values (n, 13)."""
        bottom = self.bottom(dense)
        rows = torch.cat([bottom, self.bags(features)], 1).view(len(dense), SLOTS + 1, DIM)
        products = rows @ rows.transpose(1, 2)
        return self.top(torch.cat([bottom, products[:, self.pairs[0], self.pairs[1]]], 1))


def _layers(widths: tuple[int, ...]) -> list[nn.Module]:
    return [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
