"""`RoundTotal`, `ReplicaGradients`: gradients that wait for further global batches of the same update."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from phalanx.parallel.data.replicas.round_buffers import Buffers, write_buffers


class RoundTotal:
    """The sum of the gradients of parameters over the global batches of an update that are reduced already."""

    def __init__(self) -> None:
        self.gradients: list[Tensor | None] = []
        """By parameter; empty if there are none."""

    @property
    def is_empty(self) -> bool:
        """Whether there are none."""
        return not self.gradients

    @torch.no_grad()
    def take(self, params: Iterable[Tensor]) -> None:
        """Take the gradients of parameters, which have none then. What was here before is forgotten."""
        params = list(params)
        if all(param.grad is None for param in params):
            self.gradients = []
            return
        # The memory of a gradient is that of a bucket, which the next backward pass writes to.
        self.gradients = [None if param.grad is None else param.grad.clone() for param in params]
        for param in params:
            param.grad = None

    @torch.no_grad()
    def add_to(self, params: Iterable[Tensor]) -> None:
        """Add them to the gradients of the parameters that they were taken from, and forget them."""
        if not self.gradients:
            return
        for param, total in zip(params, self.gradients, strict=True):
            if total is None:
                continue
            if param.grad is None:
                param.grad = total
            else:
                param.grad.add_(total)
        self.gradients = []

    def clear(self) -> None:
        """Forget them."""
        self.gradients = []


@dataclass(slots=True)
class ReplicaGradients:
    """The gradients and buffers of one replica, which are not reduced yet."""

    gradients: list[Tensor | None]
    buffers: Buffers

    def restore(self, model: nn.Module) -> None:
        """Let the model have them again, for the replica's next batch."""
        for param, gradient in zip(model.parameters(), self.gradients, strict=True):
            param.grad = gradient
        write_buffers(self.buffers)
