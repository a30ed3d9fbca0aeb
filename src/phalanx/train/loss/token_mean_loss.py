"""`build_token_mean_loss`: cross entropy and NLL as sum and weight, so that the mean over tokens is exact."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.errors import ConfigError
from phalanx.parallel.session import Applied
from phalanx.plan.mesh import is_sum_of_ranks
from phalanx.plan.value import Average, Push
from phalanx.train.loss.batch_reader import MeanLoss
from phalanx.train.loss.model_loss import IGNORED


class TokenMeanLoss:
    """A torch loss of classes as a sum, and the weight that its mean divides by.

    The mean is over the labels that are not ignored, each weighted by its class.

    Args:
        loss_fn: `nn.CrossEntropyLoss`, `nn.NLLLoss`, or the functions of the same names, within `MeanLoss` or not.
    """

    def __init__(self, loss_fn: Any) -> None:
        inner: Any = loss_fn.loss_fn if isinstance(loss_fn, MeanLoss) else loss_fn
        self._classes: Tensor | None = getattr(inner, "weight", None)
        self._ignored: int = getattr(inner, "ignore_index", IGNORED)
        if isinstance(inner, nn.Module):
            summed: Any = copy.copy(inner)
            summed.reduction = "sum"
        else:
            summed = partial(inner, reduction="sum")
        self.total: Callable[[Any, Any], Tensor] = summed
        if isinstance(loss_fn, MeanLoss):
            self.total = copy.copy(loss_fn)
            self.total.loss_fn = summed

    def weight(self, target: Any) -> Tensor | None:
        """Return the weight of a batch's labels; None where they are no classes, and the mean is over samples."""
        if not isinstance(target, Tensor) or target.is_floating_point():
            return None
        counted = target != self._ignored
        if self._classes is None:
            return counted.sum()
        is_class = counted & (target >= 0) & (target < len(self._classes))  # the loss itself names one that is none
        safe = torch.where(is_class, target, 0).long()
        return (self._classes.to(target.device)[safe] * counted).sum()

    def of_microbatches(self, target: Tensor, factor: Tensor) -> Callable[[Any, Any], Tensor]:
        """Return the loss of an equal part of a batch such that their mean is the sum over the batch times a factor."""

        def loss(output: Any, part: Tensor) -> Tensor:
            return self.total(output, part) * (factor * (len(target) / len(part)))

        return loss


def build_token_mean_loss(loss_fn: Any, applied: Applied | None) -> TokenMeanLoss | None:
    """Return a loss function as a sum and its weight, if it is one of those and ranks meet in every step.

    Workers of a parameter server and ranks that take local steps (localsgd) do not meet; each follows the mean over its
    own.
    """
    inner: Any = loss_fn.loss_fn if isinstance(loss_fn, MeanLoss) else loss_fn
    is_known = type(inner) in (nn.CrossEntropyLoss, nn.NLLLoss) and inner.reduction == "mean"
    if applied is None or not (is_known or inner in (F.cross_entropy, F.nll_loss)):
        return None
    meets = not any(isinstance(rule.update, Average | Push) for rule in applied.plan.params)
    return TokenMeanLoss(loss_fn) if meets and not is_sum_of_ranks(applied.plan) else None


def require_all_labels(target: Any, counted: TokenMeanLoss | None) -> None:
    """Raise if a loss over classes is not the mean over all labels of a batch: logical replicas weigh by samples.

    The weight of all of a global batch would have to be known before its replicas are computed one after the other.

    Raises:
        ConfigError: Says what to do.
    """
    if not isinstance(target, Tensor) or target.is_floating_point() or not target.dim():
        return
    weight = counted.weight(target) if counted is not None else (target != IGNORED).sum()
    if weight is not None and bool(weight != target.numel()):
        raise ConfigError(
            "a loss leaves out labels or weighs classes, so its mean over a global batch is no mean of the means of "
            "its logical replicas. Train without logical replicas, or with a loss over all labels."
        )


def check_reduction(loss_fn: Any, applied: Applied | None) -> None:
    """Raise if a loss is a sum over samples while gradients are averaged over the ranks.

    Raises:
        ConfigError: Names the loss.
    """
    inner = loss_fn.loss_fn if isinstance(loss_fn, MeanLoss) else loss_fn
    settings = inner.keywords if isinstance(inner, partial) else {}
    if applied is None or "sum" not in (getattr(inner, "reduction", None), settings.get("reduction")):
        return
    function = inner.func if isinstance(inner, partial) else inner
    name = getattr(function, "__name__", type(function).__name__)
    if not is_sum_of_ranks(applied.plan):
        raise ConfigError(
            f'{name} with reduction="sum" sums over rows, and gradients are averaged over the ranks, so training would '
            'depend on their number. Use reduction="mean", or let gradients be summed: '
            'strategy.gradient_scale_configs = {"scale_strategy": "sum"}.'
        )
    if applied.pipeline is not None:
        raise ConfigError(
            f'{name} with reduction="sum" was given for a model split into stages, which averages over micro-batches. '
            'Use reduction="mean".'
        )
