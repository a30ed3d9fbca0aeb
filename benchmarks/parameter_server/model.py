"""The model in torch: any embedding of (batch, slots) ids under the same network."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from benchmarks.parameter_server.work import DENSE, KEYS, WIDTHS, Batch, batches


class WideDeep(nn.Module):
    """Logits of clicks, shape (n, 1)."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding
        layers = [layer for pair in pairwise(WIDTHS[:-1]) for layer in (nn.Linear(*pair), nn.ReLU())]
        self.deep = nn.Sequential(*layers, nn.Linear(*WIDTHS[-2:]))
        self.wide = nn.Linear(DENSE, 1)

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        """Return the logits of ids (n, slots) and dense values (n, 13)."""
        rows = self.embedding(ids).flatten(1)
        return self.deep(torch.cat([rows, dense], 1)) + self.wide(dense)


def tensors(worker: int, keys: int = KEYS) -> list[tuple[Tensor, ...]]:
    """Return a worker's batches as tensors."""
    return [_tensors(batch) for batch in batches(worker, keys)]


def _tensors(batch: Batch) -> tuple[Tensor, ...]:
    return tuple(map(torch.from_numpy, batch))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, ...]) -> float:
    """Train on one batch and return its loss."""
    ids, dense, click = batch
    loss = nn.functional.binary_cross_entropy_with_logits(model(ids, dense), click)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
