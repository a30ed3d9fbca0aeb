"""`mean_of_replica`, `MeanScale`: exact means over labels where replicas do not know the weight of a global batch yet.

A replica's gradient is that of its sum of losses, divided by one number. Its weight is added up beside the gradients,
and the gradients of a whole global batch are divided by the weight of it at the end. That is right only if the loss is
nothing but the mean: gradients of other terms would be divided too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import phalanx.comm.context as context_of
from phalanx.comm.batch.backward_calls import Backward, BackwardOrder, around_backward
from phalanx.comm.batch.replicas import LabelMean, Replicas
from phalanx.comm.batch.share import Shares, row_weight_of
from phalanx.comm.groups import Group
from phalanx.comm.transfers import peers_named
from phalanx.errors import ConfigError
from phalanx.parallel.data.replicas.replica_reduction import ReplicaReduction

_MARK = "phalanx.replica_mean"
"""Key in the metadata of the graph node of a mean."""

_LINEAR = frozenset(
    f"{name}Backward0"
    for name in ("Mul", "Div", "Neg", "Add", "Sub", "ToCopy", "View", "Sum", "Mean", "Clone", "Squeeze", "Unsqueeze")
)
"""Nodes that only multiply what passes them, or add what has no gradient."""


def mean_of_replica(
    total: Tensor, weight: Tensor | float, shares: Shares, replicas: Replicas, *, labels_per_row: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the mean of the replica whose turn it is, and what the gradient of its sum is multiplied by.

    Args:
        total: The sum of its losses, without gradient.
        weight: Their weight.
        shares: What they are of.
        replicas: Those of the job.
        labels_per_row: Those of a row, whether they count or not, where that is known.

    Raises:
        ConfigError: If there is another such mean in the turn, or none is on.
    """
    if replicas.turn is None:
        raise ConfigError(
            "a mean over labels was asked for while no loader has given out a batch: logical replicas add up its "
            "weight over a global batch beside their gradients. Give the data to px.distribute, or make the loader "
            "with px.data.ShardedLoader."
        )
    if replicas.progress.label_mean is not None:
        raise ConfigError(
            "a second mean over labels was asked for in the turn of one logical replica, and its gradients can be "
            "divided by one weight. Add up the losses and the weights before px.weighted_mean."
        )
    own = torch.as_tensor(weight, device=total.device).reshape(()).double()
    by_rows = row_weight_of(shares, replicas.count)
    if not by_rows:
        own, total = torch.zeros_like(own), torch.zeros_like(total)  # rows that do not count may hold anything
    scale = _divisor(shares, replicas, labels_per_row, total.device)
    replicas.progress.label_mean = LabelMean(own, scale)
    if not by_rows:
        factor = 0.0
    elif shares:
        factor = shares[0].global_rows / (scale * shares[0].rows)  # rounds once, as the mean over all labels does
    else:
        factor = replicas.count / scale
    mean = torch.where(own > 0, total.reshape(()).double() / own, 0.0)
    return mean.to(total.dtype), total.new_tensor(factor)


def _divisor(shares: Shares, replicas: Replicas, labels_per_row: int | None, device: torch.device) -> float:
    """Return what all replicas divide sums of losses by, in place of the weight of the global batch.

    Where that is the weight if all labels count, nothing is left to divide by then, and gradients have the bits of a
    mean over samples, which ranks that leave and join take.
    """
    if len({share.global_rows for share in shares}) != 1:
        return 1.0
    rows = shares[0].global_rows
    if labels_per_row is None:
        return 2.0 ** math.floor(math.log2(rows))  # rounds nothing, and leaves gradients about as large as of a mean
    if replicas.labels_per_row is None:
        replicas.labels_per_row = _of_first_replica(labels_per_row, device)
    return float(rows * replicas.labels_per_row)


def _of_first_replica(number: int, device: torch.device) -> int:
    """Return the number that the first replica has, in the first turn of each rank. Collective."""
    readers = context_of.current().readers
    if readers.count == 1:
        return number
    first = torch.tensor([number if readers.index == 0 else 0], device=device)
    with peers_named("the weighted mean of a loss", readers.group):
        dist.all_reduce(first, group=readers.group)
    return int(first)


def watch_mean(mean: Tensor, replicas: Replicas) -> None:
    """Let a backward pass of more than this mean be an error, once it comes to a distributed model."""
    node: Any = mean.grad_fn
    if node is None:
        if replicas.progress.label_mean is not None:
            replicas.progress.label_mean.is_checked = True
        return
    node.metadata[_MARK] = True
    around_backward(BackwardOrder.MEANS, _check_mean)


def _check_mean(backward: Backward, tensors: Any, *args: Any, **kwargs: Any) -> None:
    replicas = context_of.current().replicas if context_of.is_initialized() else None
    is_inner = torch._C._current_graph_task_id() != -1  # of a re-entrant checkpoint
    mean = None if replicas is None or is_inner else replicas.progress.label_mean
    if mean is None:
        backward(tensors, *args, **kwargs)
        return
    if not mean.is_checked:
        mean.is_checked = _is_of_mean([tensors] if isinstance(tensors, Tensor) else tensors)
    backward(tensors, *args, **kwargs)
    mean.is_checked = False  # a further backward pass of the turn would be of something else


def _is_of_mean(roots: Sequence[Any]) -> bool:
    """Return whether what a backward pass starts from is one mean, or a multiple of it."""
    nodes = [getattr(root, "grad_fn", None) for root in roots]
    node = nodes[0] if len(nodes) == 1 else None
    while node is not None and _MARK not in node.metadata:
        before = [following for following, _ in node.next_functions if following is not None]
        is_divisor = node.name() == "DivBackward0" and node.next_functions[0][0] is None
        node = before[0] if node.name() in _LINEAR and len(before) == 1 and not is_divisor else None
    return node is not None


class MeanScale:
    """Adds up the weights of a mean over labels beside the gradients of one model.

    Args:
        replicas: Those of the job.
        group: Returns the ranks that hold them now.
    """

    def __init__(self, replicas: Replicas, group: Callable[[], Group]) -> None:
        self._replicas, self._group = replicas, group
        self._sums = ReplicaReduction(replicas)
        self._turns = 0
        """Turns of this rank in the global batch with such a mean."""

    def clear(self) -> None:
        """Forget the weights of a global batch that the loop left."""
        self._sums.clear()
        self._turns = 0

    def check(self) -> None:
        """Raise if the backward pass that runs is not that of such a mean alone, where the turn has one.

        Raises:
            ConfigError: Says where other terms belong.
        """
        mean = self._replicas.progress.label_mean
        if mean is None or mean.is_checked:
            return
        raise ConfigError(
            "a loss has other terms beside px.weighted_mean, or is no multiple of it, while a global batch is split "
            "over logical replicas: its weight is known after the last of them, and all gradients are divided by it "
            "then. Add the terms to the sum, times the weight: px.weighted_mean(total + weight * other, weight)."
        )

    def end_turn(self, *, is_last: bool) -> Tensor | None:
        """Take the weight of the turn; at the last return what gradients are multiplied by, if by anything. Collective.

        In an elastic job the partial sums stay, as those of gradients: they may be needed again.

        Raises:
            ConfigError: If only some replicas had such a mean, or no label counts.
            RuntimeError: If a rank was lost.
        """
        replicas, mean = self._replicas, self._replicas.progress.label_mean
        self._turns += mean is not None
        whole = None if mean is None else mean.weight.reshape(1).clone()
        pending = None if whole is None else self._sums.send(whole, self._group, is_last=is_last)
        if not is_last or not self._turns:
            return None
        turns, self._turns = self._turns, self._turns if replicas.is_elastic else 0
        if turns != len(replicas.local) or mean is None or whole is None or pending is None:
            raise ConfigError(
                f"{turns} of this rank's {len(replicas.local)} logical replicas had a loss that is a mean over labels, "
                "and gradients of a global batch are divided by one weight. Use one loss for all batches."
            )
        pending.wait()
        if whole.device.type == "cpu" and not whole[0]:
            raise ConfigError(
                "a mean over labels found a weight of 0 in all logical replicas: no loss of this global batch counts. "
                "Leave such batches out, on all ranks alike."
            )
        if whole.device.type == "cpu" and whole[0] == mean.scale:
            return None
        return mean.scale / whole[0]


@torch.no_grad()
def multiply_gradients(model: nn.Module, factor: Tensor) -> None:
    """Multiply the gradients of a model, or this rank's shards of them."""
    for param in model.parameters():
        grad: Any = param.grad
        if grad is not None:
            (grad.to_local() if hasattr(grad, "placements") else grad).mul_(factor)
