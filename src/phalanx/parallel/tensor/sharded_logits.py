"""`ShardedLogits`: error when sharded logits reach a loss that expects full logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from phalanx.comm import transfers
from phalanx.comm.groups import Group
from phalanx.errors import ConfigError


class ShardedLogits:
    """A hook behind a layer that leaves its logits cut: looks whether the loss knows, by the gradients that come back.

    Softmax over the classes of one rank gives each row's gradients a sum of zero there. Over all classes, the sum is
    zero on no rank but the target's, so all ranks together cannot be mistaken. Collective in the first backward passes;
    those of compiled models are not looked at.

    Args:
        name: The layer's plain name.
        axis: Name of the mesh axis over which the logits are cut.
        group: The ranks along it.
    """

    PASSES = 4
    """Passes that are looked at."""

    def __init__(self, name: str, axis: str, group: Group) -> None:
        self._name, self._axis, self._group = name, axis, group
        self._left = self.PASSES

    def __deepcopy__(self, _: dict[int, Any]) -> ShardedLogits:
        return ShardedLogits(self._name, self._axis, self._group)

    def __call__(self, _layer: nn.Module, _inputs: Any, logits: Tensor) -> None:
        """Look at the gradients of these logits when they come."""
        if self._left and not torch.compiler.is_compiling() and logits.requires_grad:
            self._left -= 1
            logits.register_hook(self._look)

    def _look(self, gradient: Tensor) -> None:
        """Raise if every rank's rows add up to zero.

        Raises:
            ConfigError: On all ranks of the group.
        """
        wide = torch.promote_types(gradient.dtype, torch.float32)
        magnitude = torch.linalg.vector_norm(gradient, 1, dim=-1, dtype=wide)
        sums = gradient.sum(-1, dtype=wide).abs()
        is_apart = ((sums <= 1e-2 * magnitude).all() & (magnitude > 0).any()).to(torch.int32)
        if transfers.all_reduce(is_apart.reshape(1), "min", self._group).item():
            raise ConfigError(
                f"the loss took the logits of {self._name!r} for whole, but each rank along axis {self._axis!r} has "
                "some of the classes only, so it is the loss of another model. Use px.vocab_cross_entropy(logits, "
                f'target, axis="{self._axis}"), or style "column" for {self._name!r}, which puts logits together.'
            )
