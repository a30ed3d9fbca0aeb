"""`SyncBatchNorm`: batch normalisation over the samples of all ranks.

Mean and variance are taken in two passes, so that a large mean does not eat the variance's digits. Gradients flow
through both over all ranks. Rows of a batch that does not count (`Context.batch.rows` is 0) are left out.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import phalanx.comm.context as context_of
from phalanx.comm.collectives import all_reduce
from phalanx.errors import ConfigError
from phalanx.parallel.data.sample_weights import row_weight, with_gradient_times


class SyncBatchNorm(_BatchNorm):
    """A batch normalisation layer that shares its statistics with the same layer of other ranks.

    Every forward pass in training is collective over the ranks that read rows of their own. Which these are, and which
    rows count, is asked of the job in every pass: a copy holds nothing of it, and normalises its own rows in a process
    that is in no job.
    """

    _is_weighed: bool
    """Whether gradients that arrive have the weight of this rank's rows already."""

    _is_sum: bool
    """Whether gradients are summed over the ranks, not averaged."""

    @classmethod
    def of(cls, layer: _BatchNorm, is_weighed: bool, is_sum: bool = False) -> SyncBatchNorm:
        """Return a layer with the same parameters, buffers and hooks, the same objects."""
        layer_norm = cls.__new__(cls)
        layer_norm.__dict__.update(layer.__dict__)
        layer_norm._is_weighed, layer_norm._is_sum = is_weighed, is_sum
        return layer_norm

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of 2 dims or more, found {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise; in training over the rows of all ranks.

        Args:
            input: Shape (rows, features, ...).
        """
        self._check_input_dim(input)
        if not self.training or not context_of.is_initialized():
            return super().forward(input)
        dims = [d for d in range(input.dim()) if d != 1]
        mean, variance, count = self._moments(input, dims)
        if self.running_mean is not None and self.running_var is not None:
            self._track(mean.detach(), variance.detach(), count)
        shape = [1, -1] + [1] * (input.dim() - 2)
        out = (input - mean.view(shape)) * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            out = out * self.weight.view(shape) + self.bias.view(shape)
        return out.to(input.dtype)

    def _moments(self, input: Tensor, dims: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        share = context_of.current().batch
        counts = 1.0 if share is None or share.rows else 0.0
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        rows = wide.new_tensor([counts * input.numel() / input.shape[1]])
        total = self._sum_over_ranks(torch.cat([wide.sum(dims) * counts, rows]))
        count = total[-1].detach()
        if count <= 1:
            raise ConfigError(
                f"batch normalisation in training needs more than 1 value per feature, found {int(count)}."
            )
        mean = total[:-1] / count
        apart = wide - mean.view([1, -1] + [1] * (input.dim() - 2))
        return mean, self._sum_over_ranks((apart * apart).sum(dims) * counts) / count, count

    def _sum_over_ranks(self, x: Tensor) -> Tensor:
        """Add up over the ranks; gradients of other ranks come back with the weight of those ranks' rows."""
        before = with_gradient_times(x, lambda: 1.0 / weight if (weight := self._weight()) else 0.0)
        return with_gradient_times(all_reduce(before, group=context_of.current().readers.group), self._weight)

    def _weight(self) -> float:
        """Return the weight that parameters give to gradients in the backward pass that runs."""
        context = context_of.current()
        return 1.0 if self._is_weighed else row_weight(context, context.readers, is_sum=self._is_sum)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        factor = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked or 1)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        unbiased = variance * (count / (count - 1))
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


def synchronise(model: nn.Module, *, is_weighed: bool = False, is_sum: bool = False) -> int:
    """Put synchronised layers in the place of a model's batch normalisations; names and tensors stay.

    Args:
        model: On its device.
        is_weighed: Whether gradients have the weight of a rank's rows inside the model already (a pipeline), or get it
            at the parameters.
        is_sum: Whether gradients are summed over the ranks, not averaged.

    Returns:
        How many were replaced.

    Raises:
        ConfigError: If one of them computes something else too, which would be lost.
    """
    local_layers = {
        name: layer for name, layer in model.named_modules(remove_duplicate=False) if name and _is_local(layer)
    }
    for name, layer in local_layers.items():
        if type(layer).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward) or "forward" in layer.__dict__:
            raise ConfigError(
                f"sync_batch_norm cannot stand in for {name!r}: {type(layer).__name__} has a forward pass of its own. "
                "Build the model with a torch batch normalisation and what follows it as a layer of its own."
            )
    replacements = {layer: SyncBatchNorm.of(layer, is_weighed, is_sum) for layer in local_layers.values()}
    for name, layer in local_layers.items():
        model.set_submodule(name, replacements[layer])
    return len(replacements)


def _is_local(layer: nn.Module) -> TypeGuard[_BatchNorm]:
    return isinstance(layer, _BatchNorm) and not isinstance(layer, SyncBatchNorm)


def keep_out_of_graph() -> None:
    """Keep these layers outside compiled graphs: what they exchange depends on the rows of the batch at hand.

    (Marking them imports torch's compiler, which costs a second, so it is done only where a step is compiled.)
    """
    SyncBatchNorm.forward = torch.compiler.disable(SyncBatchNorm.forward)  # type: ignore[method-assign]
