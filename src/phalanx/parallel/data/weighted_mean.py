"""`px.weighted_mean`: losses that average over tokens or weighted samples, exact over all ranks.

Data parallel weighs a rank's loss by the rows of its batch, which makes means over rows exact. A rank's mean over its
tokens would have to weigh by its tokens. `weighted_mean` divides the sum of a rank's losses by the weight on all ranks,
and takes out the weight by rows that the gradient gets on its way (`sample_weights`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import phalanx.comm.context as context_of
from phalanx.comm.batch.replicas import Replicas
from phalanx.comm.batch.share import Shares, row_weight_of
from phalanx.comm.collectives import apply_function
from phalanx.comm.transfers import peers_named
from phalanx.errors import ConfigError
from phalanx.parallel.data.replicas.replica_mean import mean_of_replica, watch_mean
from phalanx.parallel.session import list_applied, session
from phalanx.plan.mesh import is_sum_of_ranks


def weighted_mean(total: Tensor, weight: Tensor | float) -> Tensor:
    """Return the mean loss over all ranks of which each rank has a sum of losses and their weight.

        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        loss = px.weighted_mean(losses, (labels != -100).sum())

    The gradient of the parameters is that of the global sum divided by the global weight, on any number of ranks. It
    may be added to other terms of a loss. Rows that a rank only loaded to keep the ranks in step do not count.

    Collective over the ranks that read rows of their own, without waiting for a device: call it after the forward pass,
    on every rank, in every step. For one update of several backward passes, give the weight of all of them each time,
    and do not divide by their number.

    With logical replicas (`replicas=`) the weight of a global batch is known after the last of them, and gradients are
    divided by it then. The loss has to be the mean, or a multiple of it; what is returned is the replica's own mean.

    Args:
        total: The sum of this rank's losses, a floating-point tensor without dimensions.
        weight: Their weight: the number of tokens, or the sum of the weights of their classes.

    Returns:
        The mean over all ranks, the same on each; NaN on an accelerator where no rank has any weight.

    Raises:
        ConfigError: If the shapes do not fit, no rank has any weight, gradients are summed over the ranks, or the model
            is split into stages.
    """
    if not isinstance(total, Tensor) or total.numel() != 1 or not total.is_floating_point():
        raise ConfigError(
            f"weighted_mean takes the sum of this rank's losses, one number with gradient, found {_looks(total)}. Use "
            'reduction="sum".'
        )
    if not isinstance(weight, Tensor | int | float) or (isinstance(weight, Tensor) and weight.numel() != 1):
        raise ConfigError(f"weighted_mean takes the weight of a rank's losses as one number, found {_looks(weight)}.")
    _check_models()
    if (replicas := _replicas_to_weigh()) is not None:
        result = _of_replica(total, weight, replicas)
        watch_mean(result, replicas)
        return result
    session.has_label_weights = True
    mean, factor = global_mean_of(total.detach(), weight, _shares_now())
    return apply_function(_Mean, total.reshape(()), mean, factor)


def mean_over_labels(total: Tensor, weight: Tensor, labels_per_row: int) -> Tensor:
    """Return the mean loss over all ranks, as `weighted_mean`, or over this replica where ranks have become replicas.

    Of those all labels count. They know the weight of the global batch by their own rows, and gradients are divided by
    it as the ranks divided.

    Args:
        total: The sum of this rank's losses.
        weight: Their weight.
        labels_per_row: Labels of a row, whether they count or not.
    """
    shares, context = _shares_now(), context_of.current()
    if (replicas := _replicas_to_weigh()) is not None:
        return _of_replica(total, weight, replicas, labels_per_row)
    if context.replicas is None:
        mean, factor = global_mean_of(total.detach(), weight, shares)
        return apply_function(_Mean, total.reshape(()), mean, factor)
    factor = factor_of_all_labels(weight, shares).to(total.dtype)
    return apply_function(_Mean, total.reshape(()), total.detach() / weight.to(total.dtype), factor)


def factor_of_all_labels(weight: Tensor, shares: Shares) -> Tensor:
    """Return what the gradient of a replica's sum is multiplied by where all labels count: as `global_mean_of` does.

    Args:
        weight: That of the replica.
        shares: What it is of.
    """
    own, count = weight.double(), context_of.current().readers.shares
    whole = own * count if not shares else own * shares[0].global_rows / max(shares[0].rows, 1)
    return _factor(whole, row_weight_of(shares, count), count)


def _replicas_to_weigh() -> Replicas | None:
    """Return the logical replicas that were asked for; None without such, and where ranks have become replicas."""
    replicas = context_of.current().replicas if context_of.is_initialized() else None
    return None if replicas is None or replicas.were_ranks else replicas


def _of_replica(total: Tensor, weight: Tensor | float, replicas: Replicas, labels_per_row: int | None = None) -> Tensor:
    shares = _shares_now()
    mean, factor = mean_of_replica(total.detach(), weight, shares, replicas, labels_per_row=labels_per_row)
    if labels_per_row is not None and replicas.progress.label_mean is not None:
        replicas.progress.label_mean.is_checked = True  # the loss of a step that has no other terms
    return apply_function(_Mean, total.reshape(()), mean, factor)


def _factor(whole: Tensor, by_rows: float, ranks: int) -> Tensor:
    """Return what the gradient of a rank's sum is multiplied by, besides its rows."""
    return ranks / (whole * by_rows) if by_rows else torch.zeros_like(whole)


def _note_weights(weight: Tensor, whole: Tensor, shares: Shares, ranks: int) -> None:
    """Remember whether labels weigh otherwise than rows, without waiting for a device."""
    rows, all_rows = (shares[0].rows, shares[0].global_rows) if shares else (1, ranks)
    differs = whole * rows != weight * all_rows
    session.has_label_weights = differs | session.has_label_weights


def mean_of_means(mean: Tensor, weight: Tensor) -> Tensor:
    """Return the mean loss over all ranks of which each rank has its mean and the weight of that; see `weighted_mean`.

    A mean over nothing, which is undefined, does not count.
    """
    weight = weight.double()
    total = torch.where(weight > 0, mean.detach().double(), 0.0) * weight
    whole, factor = global_mean_of(total, weight, _shares_now())
    # One factor, rounded once: where ranks have equal weights it is 1.
    return apply_function(_Mean, mean.reshape(()), whole.to(mean.dtype), (factor * weight).to(mean.dtype))


def _shares_now() -> Shares:
    return context_of.current().passes.now() if context_of.is_initialized() else ()


def _check_models() -> None:
    """Raise if the loss that is computed now is of a model whose gradients cannot be those of a mean over ranks.

    Several models may be distributed: of those, the ones that were called since the last backward pass count.
    """
    models = list_applied()
    pipelines = [applied.pipeline for applied in models if applied.pipeline is not None]
    if pipelines and (len(pipelines) == len(models) or any(pipeline.is_running for pipeline in pipelines)):
        raise ConfigError(
            "weighted_mean takes a whole batch, and a model split into stages computes losses of micro-batches. Give "
            "px.train_step a torch loss (nn.CrossEntropyLoss), which is exact there, or train without stages."
        )
    sums = [is_sum_of_ranks(applied.plan) for applied in models]
    if any(sums) and (all(sums) or context_of.current().passes.is_any_sum()):
        raise ConfigError(
            'weighted_mean makes a mean, and scale_strategy "sum" sums gradients over the ranks. Use "avg", the '
            "default, or divide the sum by a weight that is the same on all ranks."
        )


def global_mean_of(total: Tensor, weight: Tensor | float, shares: Shares) -> tuple[Tensor, Tensor]:
    """Return the mean over the ranks, and what the gradient of this rank's sum is multiplied by. Collective.

    Args:
        total: The sum of this rank's losses, without gradient.
        weight: Their weight.
        shares: What they are of.
    """
    readers = context_of.current().readers if context_of.is_initialized() else None
    if readers is not None and readers.shares > readers.count:
        raise ConfigError(
            f"weighted_mean needs the weights of all of a global batch at once, and {readers.count} ranks compute its "
            f"{readers.shares} logical replicas one after the other. Start as many ranks as there are replicas."
        )
    ranks = 1 if readers is None else readers.count
    by_rows = row_weight_of(shares, ranks)
    sums = torch.stack([total.reshape(()).double(), torch.as_tensor(weight, device=total.device).reshape(()).double()])
    if not by_rows:
        sums = torch.zeros_like(sums)  # rows that do not count may hold anything
    own = sums[1].clone()
    if readers is not None and ranks > 1:
        with peers_named("the weighted mean of a loss", readers.group):
            dist.all_reduce(sums, group=readers.group)
    if sums.device.type == "cpu" and not sums[1]:
        raise ConfigError(
            "weighted_mean found a weight of 0 on all ranks: no loss of this batch counts. Leave such batches out, on "
            "all ranks alike."
        )
    _note_weights(own, sums[1], shares, ranks)
    factor = _factor(sums[1], by_rows, ranks)
    return (sums[0] / sums[1]).to(total.dtype), factor.to(total.dtype)


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, mean: Tensor, factor: Tensor) -> Tensor:
        ctx.factor = factor
        return mean.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        factor = ctx.factor
        # The gradient of what does not count may be undefined, so it is not multiplied by zero.
        return (torch.where(factor == 0, 0.0, grads[0] * factor), None, None)


def _looks(value: object) -> str:
    return f"shape {tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
