"""`TierModel`: the network over the rows of a step, with which a server is timed under training."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

SLOTS = 26
_WIDTH = 400
_LEARNING_RATE = 0.01


class TierModel:
    """Three hidden layers of 400 on 26 rows an example, trained with SGD.

    Args:
        dim: Values of a row.
    """

    def __init__(self, dim: int) -> None:
        torch.manual_seed(0)
        hidden = [layer for _ in range(2) for layer in (nn.Linear(_WIDTH, _WIDTH), nn.ReLU())]
        self._network = nn.Sequential(nn.Linear(SLOTS * dim, _WIDTH), nn.ReLU(), *hidden, nn.Linear(_WIDTH, 1))
        self._optimizer = torch.optim.SGD(self._network.parameters(), lr=_LEARNING_RATE)

    def train_step(self, rows: NDArray[np.float32], places: NDArray[np.int64]) -> NDArray[np.float32]:
        """Train on one batch; return the gradient of every row.

        Args:
            rows: Of the distinct ids of the batch, (ids, dim).
            places: Which of them each slot of each example has, (examples * 26,).
        """
        weight = torch.from_numpy(rows).requires_grad_()
        examples = nn.functional.embedding(torch.from_numpy(places), weight).view(-1, SLOTS * weight.shape[1])
        logits = self._network(examples)
        nn.functional.binary_cross_entropy_with_logits(logits, torch.ones_like(logits)).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        assert weight.grad is not None
        return weight.grad.numpy()
