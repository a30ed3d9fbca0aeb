"""`sample_weight_hook`: weight a rank's gradients by its number of samples, so that uneven batches stay exact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from phalanx.comm.collectives import apply_function
from phalanx.comm.context import Context, DataParallelRank


def sample_weight_hook(
    context: Context, readers: DataParallelRank, *, is_sum: bool = False, gain: float = 1.0
) -> Callable[[Tensor], Tensor]:
    """Return a hook that weights a gradient by this rank's part of the rows; even parts weigh 1.

    Apply it before gradients accumulate, so that batches of different sizes can be added up.

    Args:
        context: Tells the batch that the gradients are of.
        readers: Tells over how many shares the samples of a global batch are split.
        is_sum: Whether gradients are summed over the ranks: rows then weigh alike, and count or do not.
        gain: A further factor.
    """
    weight, shares = (
        context.passes.weight_of_backward,
        readers.shares,
    )  # looked up once: each parameter's gradient comes

    def weigh(gradient: Tensor) -> Tensor:
        factor = gain * weight(shares, is_sum)
        return gradient if factor == 1.0 else times(gradient, factor)

    return weigh


def row_weight(context: Context, readers: DataParallelRank, *, is_sum: bool = False) -> float:
    """Return the weight of this rank's rows in the backward pass that runs."""
    return context.passes.weight_of_backward(readers.shares, is_sum)


def with_gradient_times(x: Tensor, factor: Callable[[], float]) -> Tensor:
    """Return `x`; its gradient is multiplied by what `factor` returns when it comes."""
    return apply_function(_GradientTimes, x, factor)


def weighted_outputs(outputs: Any, factor: Callable[[], float]) -> Any:
    """Return a model's outputs; gradients that enter the model through them are multiplied by `factor()` then.

    Each of several outputs has a way in of its own: one may be computed from another, and what comes back through it
    has its weight already. A single one stays the tensor it is, which may be changed in place.
    """
    tensors = [x for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.requires_grad]
    if len(tensors) == 1:
        tensors[0].register_hook(lambda gradient: times(gradient, factor()))
        return outputs
    return tree_map_only(Tensor, lambda x: with_gradient_times(x, factor) if x.requires_grad else x, outputs)


def without_views(outputs: Any, inputs: Any) -> Any:
    """Return outputs of a module of which no tensor is a view that nobody else sees the memory of.

    A linear layer over sequences makes views. Torch drops the hooks of a view that is changed in place, such as by
    `nn.ReLU(inplace=True)`; those of any other tensor stay. Views of what another output or an input lies in stay as
    they are: autograd has to see that a change of one is a change of both. Code that is being compiled would break in
    two here.
    """
    if torch.compiler.is_compiling():
        return outputs
    seen = Counter(_memory(x) for x in tree_leaves((outputs, inputs)) if isinstance(x, Tensor))

    def owned(x: Tensor) -> Tensor:
        base = x._base if x.requires_grad else None
        is_trained = base is not None and base.is_leaf and base.requires_grad  # torch refuses to change those
        return x if base is None or is_trained or seen[_memory(x)] > 1 else apply_function(_Owned, x)

    return tree_map_only(Tensor, owned, outputs)


def _memory(tensor: Tensor) -> int:
    # Sparse tensors have no one storage, and no views.
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else id(tensor)


class _Owned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()  # no view of x, but what x is saved for notices changes in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class _GradientTimes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Callable[[], float]) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return times(grads[0], ctx.factor()), None


def times(gradient: Tensor, factor: float) -> Tensor:
    """Return a gradient times a factor, a gradient of zeros for 0."""
    if factor == 1.0:
        return gradient
    # What does not count may be undefined, so it is not multiplied by zero.
    return gradient * factor if factor else torch.zeros_like(gradient)
