"""`ReplicaGradients`: gradients of a logical replica that wait for further batches of the same update."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from phalanx.parallel.data.round_buffers import Buffers, write_buffers


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
