"""`copy_to`, `reduce_from`: Megatron's conjugate communication operators: copy/reduce and gather/scatter with autograd.

Ranks of the group compute the same loss from the same rows, so here a gradient of a whole tensor is whole on every
rank already, and is not added up again; that is how these differ from `phalanx.comm`, where losses of ranks are added.

    function      forward              backward
    copy_to       identity             all-reduce
    reduce_from   all-reduce           identity
    gather_from   all-gather           this rank's slice
    scatter_to    this rank's slice    all-gather

Sequence parallel needs no pair of its own: `comm.all_gather` and `comm.reduce_scatter` are each other's conjugates.
Shoeybi et al., arXiv:1909.08053, section 3; Korthikanti et al., arXiv:2205.05198, section 4.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.comm import transfers
from phalanx.comm.collectives import apply_function
from phalanx.comm.groups import Group
from phalanx.parallel.tensor.shard_spec import ShardSpec


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return transfers.all_reduce(grads[0], "sum", ctx.group), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return transfers.all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


class _GatherFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, spec: ShardSpec) -> Tensor:
        ctx.dim, ctx.spec = dim, spec
        return spec.join(transfers.all_gather(x, dim, spec.sizes, spec.group), dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.spec.part(grads[0], ctx.dim), None, None


class _ScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, spec: ShardSpec) -> Tensor:
        ctx.dim, ctx.spec = dim, spec
        return spec.part(x, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        spec: ShardSpec = ctx.spec
        return spec.join(transfers.all_gather(grads[0], ctx.dim, spec.sizes, spec.group), ctx.dim), None, None


def copy_to(x: Tensor, group: Group) -> Tensor:
    """Return a whole tensor for a layer that is cut: each rank's gradient of it is a term, and terms are added."""
    return apply_function(_CopyTo, x, group)


def reduce_from(x: Tensor, group: Group) -> Tensor:
    """Return the sum of the ranks' terms. Collective."""
    return apply_function(_ReduceFrom, x, group)


def gather_from(x: Tensor, dim: int, spec: ShardSpec) -> Tensor:
    """Return the ranks' slices put together, for what every rank computes alike. Collective.

    Args:
        x: This rank's slice.
        dim: Dim that is cut, counted from the front.
        spec: How.
    """
    return apply_function(_GatherFrom, x, dim, spec)


def scatter_to(x: Tensor, dim: int, spec: ShardSpec) -> Tensor:
    """Return this rank's slice of a whole tensor; the gradients of all slices are put together."""
    return apply_function(_ScatterTo, x, dim, spec)
