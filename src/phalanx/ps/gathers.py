"""`rows_per_id`, `rows_per_bag`: the rows of ids as torch gathers and pools them; the core pools, and sums gradients.

A lookup has found the distinct ids already, so the gradient of each row is a sum in the order of the ids. torch would
sort the ids of bags again and add row by row; for 110,000 ids of 16 values this takes 6 to 8 ms, and the core 0.4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.errors import ConfigError
from phalanx.ps.features import FeatureRows
from phalanx.ps.pooling.bags import Bags
from phalanx.versions import HAS_NATIVE

if HAS_NATIVE:
    from phalanx import _core

LookedUpBags = tuple[FeatureRows, Bags]
"""Rows, and which of them make a bag."""


def rows_per_id(feature: FeatureRows, shape: torch.Size) -> Tensor:
    """Return the row of each id.

    Args:
        feature: The rows.
        shape: Of the ids.

    Returns:
        Shape (*shape, dim).
    """
    index = feature.index.view(shape)
    if not (_may_take_core() and _is_plain(feature.rows)):
        return F.embedding(index, feature.rows, padding_idx=feature.padding)
    gathered: Tensor = _RowsPerId.apply(feature.rows, index)  # type: ignore[no-untyped-call]
    return gathered


def rows_per_bag(looked_up: Sequence[LookedUpBags]) -> list[Tensor]:
    """Return the pooled rows of the bags of several features.

    One node of torch's graph pools them all, and sums the gradients of their rows. What torch must do has nodes of its
    own, and so have bags with weights: torch guards these until the backward pass of their node.

    Args:
        looked_up: The rows of each feature, and which of them make a bag.

    Returns:
        Shape (bags, dim) for each feature.
    """
    pooled: dict[int, Tensor] = {}
    together, may_take_core = [], _may_take_core()
    for number, (feature, bags) in enumerate(looked_up):
        weights = None if bags.weights is None else bags.weights.to(feature.rows.device, feature.rows.dtype)
        takes_core = may_take_core and bags.mode != "max" and _is_plain(feature.rows)
        if not takes_core or (weights is not None and weights.requires_grad):
            pooled[number] = _pool(feature, bags, weights)
        elif weights is None:
            together.append(number)
        else:
            pooled |= _pool_in_one_node({number: (feature, bags)}, weights)
    # Rows that features share get the sum of their gradients. torch begins it with the last of nodes, and with the
    # first input of one node: in reverse both give the same bits.
    if together:
        pooled |= _pool_in_one_node({number: looked_up[number] for number in reversed(together)}, None)
    return [pooled[number] for number in range(len(looked_up))]


def _pool_in_one_node(looked_up: Mapping[int, LookedUpBags], weights: Tensor | None) -> dict[int, Tensor]:
    rows = [feature.rows for feature, _ in looked_up.values()]
    pooled: tuple[Tensor, ...] = _RowsPerBag.apply(weights, [*looked_up.values()], *rows)  # type: ignore[no-untyped-call]
    return dict(zip(looked_up, pooled, strict=True))


def _pool(feature: FeatureRows, bags: Bags, weights: Tensor | None) -> Tensor:
    if len(bags.starts) == 1:  # of no bags but ids torch writes beyond its memory
        return feature.rows[:0].clone()
    return F.embedding_bag(
        feature.index,
        feature.rows,
        bags.starts.to(feature.rows.device),
        mode=bags.mode,
        per_sample_weights=None if weights is None else weights.reshape(-1),
        include_last_offset=True,
        padding_idx=feature.padding,
    )


def _may_take_core() -> bool:
    if not (HAS_NATIVE and torch.is_grad_enabled()) or torch.compiler.is_compiling():
        return False
    return not torch._C._are_functorch_transforms_active()  # torch's own gathers know what torch.func makes of them


def _is_plain(rows: Tensor) -> bool:
    is_float32 = rows.device.type == "cpu" and rows.dtype is torch.float32
    return is_float32 and rows.requires_grad and rows.is_contiguous()


def _is_narrow(rows: Tensor) -> bool:
    """Return whether the core pools rows as fast as torch, of which each call costs some microseconds more."""
    dim = rows.shape[1]
    return dim <= 16 and dim % 4 == 0


def _array_of(gradient: Tensor) -> NDArray[np.float32]:
    """Return a gradient whose rows may lie apart, and the values of a row side by side."""
    gradient = gradient.resolve_neg()
    try:
        values: NDArray[np.float32] = (gradient if gradient.stride(-1) == 1 else gradient.contiguous()).numpy()
    except RuntimeError as error:
        raise ConfigError(
            "The gradients of looked-up rows were asked for many outputs at once (is_grads_batched=True, or "
            "vectorize=True), and they are summed for one at a time. Use torch.func.jacrev, or ask for them in a loop."
        ) from error
    return values


class _RowsPerId(torch.autograd.Function):
    """Its gradient includes that of padding, which the table leaves out."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = rows.shape
        return F.embedding(index, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        (index,), gradient = ctx.saved_tensors, gradients[0].reshape(-1, ctx.shape[1])
        index = index.reshape(-1)
        if torch.is_grad_enabled():  # the gradient will have a gradient
            return gradient.new_zeros(ctx.shape).index_add(0, index, gradient), None
        sums = gradient.new_zeros(ctx.shape)
        _core.add_weighted(index.numpy(), np.ascontiguousarray(_array_of(gradient)), 1.0, sums.numpy())
        return sums, None


class _RowsPerBag(torch.autograd.Function):
    """Its outputs may have their backward passes one after the other: torch frees what it has saved, weights alone."""

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor | None, looked_up: Sequence[LookedUpBags], *rows: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # rows whose bags get no gradient get none
        ctx.is_weighted = weights is not None
        # Weights may be memory of the script: autograd refuses a backward pass after they have changed.
        ctx.save_for_backward(None if weights is None else weights.reshape(-1).contiguous())
        ctx.shapes = [of_feature.shape for of_feature in rows]
        ctx.bags = [
            (f.index.numpy(), bags.starts.numpy(), -1 if f.padding is None else f.padding, bags.mode == "mean")
            for f, bags in looked_up
        ]
        by_core = [weights is None and _is_narrow(of_feature) for of_feature in rows]
        pooled = [
            of_feature.new_empty(len(bags.starts) - 1, of_feature.shape[1]) if core else _pool(feature, bags, weights)
            for core, of_feature, (feature, bags) in zip(by_core, rows, looked_up, strict=True)
        ]
        _core.pool_bags(
            [(*bags, None) for bags in compress(ctx.bags, by_core)],
            [of_feature.detach().numpy() for of_feature in compress(rows, by_core)],
            [of_bags.numpy() for of_bags in compress(pooled, by_core)],
        )
        return tuple(pooled)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        weights = ctx.saved_tensors[0].detach().numpy() if ctx.is_weighted else None
        sums = [None if g is None else g.new_zeros(shape) for g, shape in zip(gradients, ctx.shapes, strict=True)]
        reached = [(*bags, weights) for bags, total in zip(ctx.bags, sums, strict=True) if total is not None]
        of_bags = [_array_of(gradient) for gradient in gradients if gradient is not None]
        _core.add_bag_gradients(reached, of_bags, [total.numpy() for total in sums if total is not None])
        return None, None, *sums
