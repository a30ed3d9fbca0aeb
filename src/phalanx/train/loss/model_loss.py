"""Losses that a model computes itself (`ModelOutput.loss`), and its logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from phalanx.data.loader.binding import entry_of
from phalanx.errors import ConfigError
from phalanx.train.metrics.base import AllRanks, SampleMean

IGNORED = -100
"""The class that a sample or token without a target has; torch's and transformers' own."""


def loss_of(output: Any, _target: Any = None) -> Tensor:
    """Return the loss that a net without a loss function returned: its output, or what that calls `loss`.

    Raises:
        ConfigError: If there is none.
    """
    loss = output if isinstance(output, Tensor) else entry_of(output, "loss")
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss if not loss.dim() else loss.reshape(())
    kind = type(output).__name__
    description = (
        f"a tensor of shape {tuple(loss.shape)}" if loss is output else f"a {kind} without a loss of one element"
    )
    raise ConfigError(
        "without loss_fn a net returns its loss, as one element or under the name loss, as models of transformers do "
        f"when the batch has labels; found {description}. Let the data yield the targets under the name that the net "
        "has for them, or pass loss_fn=."
    )


def logits_of(output: Any) -> Any:
    """Return the `logits` of an output of several values that has some, such as a ModelOutput; else the output."""
    logits = None if isinstance(output, Tensor | tuple | list) else entry_of(output, "logits")
    return output if logits is None else logits


def is_torch_loss(loss_fn: Any) -> bool:
    """Return whether a loss is one of torch's own, which take scores and nothing else."""
    loss_fn = loss_fn.func if isinstance(loss_fn, partial) else loss_fn
    of = loss_fn if hasattr(loss_fn, "__name__") else type(loss_fn)
    return str(getattr(of, "__module__", "")).startswith("torch.nn.")


def on_logits(loss_fn: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
    """Return a loss function that takes outputs of several values too; the same unless it is one of torch's own."""
    if not is_torch_loss(loss_fn):
        return loss_fn

    @wraps(loss_fn, updated=())
    def loss(output: Any, target: Any) -> Tensor:
        return loss_fn(logits_of(output), target)

    return loss


class ModelLossMetric(SampleMean):
    """The mean over all samples of the loss that a net returns of each batch."""

    def __init__(self) -> None:
        super().__init__("loss", loss_of)

    def reset(self) -> None:
        """Forget all samples."""
        super().reset()
        self._ignored = torch.zeros((), dtype=torch.int64)

    def update(self, output: Any, target: Any) -> None:
        """Add the samples of a batch."""
        super().update(output, target)
        if isinstance(target, Tensor) and not target.is_floating_point():
            self._ignored = self._ignored.to(target.device) + (target == IGNORED).sum()

    def compute(self, ranks: AllRanks) -> float:
        """Return the mean.

        Raises:
            ConfigError: If samples do not all weigh the same in the means of their batches; on all ranks.
        """
        if ignored := int(ranks.sum(self._ignored)):
            raise ConfigError(
                f"the loss that the net returns is a mean over the targets that count, and {ignored} are {IGNORED}: "
                "the mean over all data cannot be told from means of batches. Pass loss_fn=, a function of (output, "
                "target) to one value for each row, or divide two metrics: the sum of a row's losses and the number of "
                "its targets."
            )
        return super().compute(ranks)
