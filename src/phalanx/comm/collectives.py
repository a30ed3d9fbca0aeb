"""Collectives with autograd: `all_reduce`, `all_gather`, `reduce_scatter`, `broadcast`, `all_to_all`.

Convention for every backward here: the loss is the sum over ranks of what each rank calls its loss. So the gradient of
a value that reached several ranks is the sum of their gradients, and a job whose loss is the *mean* over ranks divides
by the number of ranks once, itself.

    forward          backward
    all_reduce sum   all_reduce sum
    all_reduce mean  all_reduce mean
    all_gather       reduce_scatter sum
    reduce_scatter   all_gather
    broadcast        reduce sum to the source
    all_to_all       all_to_all the other way

All are collective over the group: every rank of it calls them in the same order with the same dtype and number of dims.
`group=` names the ranks, or `axis=` an axis of the mesh of the model that was distributed last; all ranks when neither
is given. With one process, or a group of one, they cost nothing. Backward passes are made of the same functions, so
they may be differentiated again. `send` and `recv` are in `point_to_point`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm import transfers
from phalanx.comm.groups import Group, along_axis, require_member, size_of
from phalanx.errors import ConfigError

ReduceOp = Literal["sum", "mean", "max", "min"]


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, op: str, group: Group) -> Tensor:
        ctx.op, ctx.group = op, group
        return transfers.all_reduce(x, op, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return apply_function(_AllReduce, grads[0], ctx.op, ctx.group), None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sizes: list[int], group: Group) -> Tensor:
        ctx.dim, ctx.sizes, ctx.group = dim, sizes, group
        return torch.cat(transfers.all_gather(x, dim, sizes, group), dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return apply_function(_ReduceScatter, grads[0], ctx.dim, ctx.sizes, "sum", ctx.group), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sizes: list[int], op: str, group: Group) -> Tensor:
        ctx.dim, ctx.sizes, ctx.op, ctx.group = dim, sizes, op, group
        return transfers.reduce_scatter(x, dim, sizes, op, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0] / len(ctx.sizes) if ctx.op == "mean" else grads[0]
        return apply_function(_AllGather, grad, ctx.dim, ctx.sizes, ctx.group), None, None, None, None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, src: int, group: Group) -> Tensor:
        ctx.src, ctx.group = src, group
        return transfers.broadcast(x, src, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return apply_function(_ReduceTo, grads[0], ctx.src, ctx.group), None, None


class _ReduceTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dst: int, group: Group) -> Tensor:
        ctx.dst, ctx.group = dst, group
        total = transfers.all_reduce(x, "sum", group)
        return total if dist.get_rank(group) == dst else torch.zeros_like(total)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return apply_function(_Broadcast, grads[0], ctx.dst, ctx.group), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: transfers.Exchange, group: Group) -> Tensor:
        ctx.plan, ctx.group = plan, group
        return transfers.all_to_all(x, plan, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return apply_function(_AllToAll, grads[0], ctx.plan.reversed(), ctx.group), None, None


def all_reduce(x: Tensor, op: ReduceOp = "sum", *, group: Group = None, axis: str | None = None) -> Tensor:
    """Combine a tensor over the ranks; every rank gets the result.

    Collective over `group`. Gradient: the same reduction of the ranks' gradients.

    Args:
        x: Tensor, same shape and dtype on all ranks. Not modified.
        op: `sum`, `mean`, or `max` / `min`, which carry no gradient.
        group: Ranks that take part; all when omitted.
        axis: The same by the name of a mesh axis.

    Returns:
        Shape and dtype of `x`.

    Raises:
        ConfigError: For an unknown op, `mean` of integers, a gradient through `max` or `min`, or a rank outside
            `group`.
        PeerLostError: If a rank was lost.
    """
    _require_tensor(x, "all_reduce")
    group, size = ranks_of(group, axis, "all_reduce")
    if op not in ("sum", "mean", "max", "min"):
        raise ConfigError(f"all_reduce knows op 'sum', 'mean', 'max' and 'min', found {op!r}. Use one of them.")
    _require_fractions(x, op, "all_reduce")
    if op in ("max", "min"):
        if x.requires_grad and torch.is_grad_enabled():
            raise ConfigError(f"all_reduce with op={op!r} carries no gradient, but x requires one. Pass x.detach().")
        return transfers.all_reduce(x, op, group) if size > 1 else x
    return apply_function(_AllReduce, x, op, group) if size > 1 else x


def all_gather(
    x: Tensor,
    dim: int = 0,
    *,
    sizes: Sequence[int] | None = None,
    same_shapes: bool = False,
    group: Group = None,
    axis: str | None = None,
) -> Tensor:
    """Concatenate the ranks' tensors along one dim; every rank gets the whole.

    Collective over `group`. Gradient: the sum over ranks of the gradients of this rank's part.

    Args:
        x: This rank's part; parts may differ in size along `dim` only. Not modified.
        dim: Dim to concatenate along.
        sizes: Size along `dim` of every rank's part, when known; else ranks first tell each other.
        same_shapes: Promise that all parts have the shape of `x`; saves telling.
        group: Ranks that take part, in rank order; all when omitted.
        axis: The same by the name of a mesh axis.

    Returns:
        Shape of `x`, with the sum of the sizes at `dim`.

    Raises:
        ConfigError: If shapes differ elsewhere than along `dim`, on all ranks alike; or for a rank outside `group`.
        PeerLostError: If a rank was lost.
    """
    _require_tensor(x, "all_gather")
    dim = _dim(x, dim, "all_gather")
    group, size = ranks_of(group, axis, "all_gather")
    if size == 1:
        return x
    return apply_function(_AllGather, x, dim, transfers.part_sizes(x, dim, sizes, same_shapes, group), group)


def all_gather_list(
    x: Tensor,
    dim: int = 0,
    *,
    sizes: Sequence[int] | None = None,
    same_shapes: bool = False,
    group: Group = None,
    axis: str | None = None,
) -> list[Tensor]:
    """Return every rank's tensor, in rank order; like `all_gather`, but as a list.

    Collective over `group`; arguments, gradient and errors as in `all_gather`. `dim` is where parts may differ.
    """
    _require_tensor(x, "all_gather_list")
    dim = _dim(x, dim, "all_gather_list")
    group, size = ranks_of(group, axis, "all_gather_list")
    if size == 1:
        return [x]
    lengths = transfers.part_sizes(x, dim, sizes, same_shapes, group)
    return list(torch.split(apply_function(_AllGather, x, dim, lengths, group), lengths, dim))


def reduce_scatter(
    x: Tensor,
    dim: int = 0,
    *,
    op: Literal["sum", "mean"] = "sum",
    sizes: Sequence[int] | None = None,
    group: Group = None,
    axis: str | None = None,
) -> Tensor:
    """Combine a tensor over the ranks and keep this rank's slice along one dim.

    Collective over `group`. Gradient: the gradients of all slices, concatenated (divided by the ranks for `mean`).

    Args:
        x: Tensor, same shape and dtype on all ranks. Not modified.
        dim: Dim to slice along.
        op: `sum` or `mean`.
        sizes: Size of every rank's slice, the same list on all ranks; an even cut when omitted.
        group: Ranks that take part; all when omitted.
        axis: The same by the name of a mesh axis.

    Returns:
        Shape of `x`, with this rank's size at `dim`.

    Raises:
        ConfigError: If `sizes` do not add up, or an even cut does not divide; for an unknown op or `mean` of integers;
            or for a rank outside `group`.
        PeerLostError: If a rank was lost.
    """
    _require_tensor(x, "reduce_scatter")
    if op not in ("sum", "mean"):
        raise ConfigError(f"reduce_scatter knows op 'sum' and 'mean', found {op!r}. Use one of them.")
    _require_fractions(x, op, "reduce_scatter")
    dim = _dim(x, dim, "reduce_scatter")
    group, size = ranks_of(group, axis, "reduce_scatter")
    slices = _split_sizes(x.shape[dim], sizes, size, "reduce_scatter")
    return apply_function(_ReduceScatter, x, dim, slices, op, group) if size > 1 else x


def broadcast(x: Tensor, src: int = 0, *, group: Group = None, axis: str | None = None) -> Tensor:
    """Return the tensor of one rank on every rank.

    Collective over `group`. Gradient: the source gets the sum of all ranks' gradients, the others zero.

    Args:
        x: Tensor, same shape and dtype on all ranks. Not modified.
        src: Rank within the group whose values are taken.
        group: Ranks that take part; all when omitted.
        axis: The same by the name of a mesh axis.

    Raises:
        ConfigError: If `src` is not a rank of the group, or this rank is outside it.
        PeerLostError: If a rank was lost.
    """
    _require_tensor(x, "broadcast")
    group, size = ranks_of(group, axis, "broadcast")
    if not 0 <= src < size:
        raise ConfigError(f"broadcast from rank {src} needs a group of more than {src} ranks, found {size}.")
    return apply_function(_Broadcast, x, src, group) if size > 1 else x


def all_to_all(
    x: Tensor,
    split_dim: int = 0,
    concat_dim: int | None = None,
    *,
    sizes: Sequence[int] | None = None,
    arriving: Sequence[int] | None = None,
    group: Group = None,
    axis: str | None = None,
) -> Tensor:
    """Send slice r of this rank's tensor to rank r, and concatenate what the ranks sent here.

    Collective over `group`. Gradient: every slice's gradient travels back to where the slice came from.

    Args:
        x: Tensor; ranks may differ in shape as long as what arrives fits together. Not modified.
        split_dim: Dim that is cut into one slice per rank.
        concat_dim: Dim along which arrived slices are joined, in rank order; `split_dim` when omitted.
        sizes: Size of the slice for each rank, each rank its own list; an even cut when omitted.
        arriving: Size along `concat_dim` of the slice from each rank, when known; else ranks first tell each other.
        group: Ranks that take part; all when omitted.
        axis: The same by the name of a mesh axis.

    Raises:
        ConfigError: If `sizes` do not add up, an even cut does not divide, or the slices that arrive do not fit, on all
            ranks alike.
        PeerLostError: If a rank was lost.
    """
    _require_tensor(x, "all_to_all")
    split_dim = _dim(x, split_dim, "all_to_all")
    concat_dim = split_dim if concat_dim is None else _dim(x, concat_dim, "all_to_all")
    group, size = ranks_of(group, axis, "all_to_all")
    slices = _split_sizes(x.shape[split_dim], sizes, size, "all_to_all")
    if size == 1:
        return x
    if arriving is None:
        exchange = transfers.plan_exchange(x, split_dim, concat_dim, slices, group)
    else:
        exchange = transfers.known_exchange(x, split_dim, concat_dim, slices, arriving, group)
    return apply_function(_AllToAll, x, exchange, group)


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    """Return what an autograd Function of one result makes of its arguments."""
    result: Tensor = function.apply(*args)
    return result


def _require_tensor(x: Any, verb: str) -> None:
    """Raise if a collective that returns its result was called as torch's of that name, which fills a list.

    Raises:
        ConfigError: Says what to write.
    """
    if isinstance(x, Tensor):
        return
    kind = f"a list of {len(x)}" if isinstance(x, list | tuple) else type(x).__name__
    raise ConfigError(
        f"{verb} takes this rank's tensor first and returns the result, found {kind}. Write {_RETURNING[verb]}; "
        f"torch.distributed.{verb} fills what it is given."
    )


_RETURNING = {
    "all_gather": "parts = px.comm.all_gather_list(x)",
    "all_gather_list": "parts = px.comm.all_gather_list(x)",
    "all_reduce": "total = px.comm.all_reduce(x)",
    "reduce_scatter": "mine = px.comm.reduce_scatter(torch.cat(parts))",
    "broadcast": "x = px.comm.broadcast(x, src=0)",
    "all_to_all": "arrived = px.comm.all_to_all(torch.cat(parts), sizes=[len(part) for part in parts])",
}
"""How each collective is called."""


def ranks_of(group: Group, axis: str | None, verb: str) -> tuple[Group, int]:
    """Return the group of a call, named by itself or by an axis of the mesh in use, and its number of ranks.

    Raises:
        ConfigError: If both are given, the mesh has no such axis, or this rank is outside the group.
    """
    if axis is not None:
        if group is not None:
            raise ConfigError(f"{verb} takes group= or axis=, found both. Leave one out.")
        return along_axis(axis, verb)
    if not dist.is_initialized():
        transfers.check_not_alone(verb)
        return None, 1
    require_member(group, verb)
    return group, size_of(group)


def _require_fractions(x: Tensor, op: str, verb: str) -> None:
    if op == "mean" and not (x.is_floating_point() or x.is_complex()):
        raise ConfigError(f"{verb} cannot take the mean of {x.dtype}: use op='sum' and divide, or convert to float.")


def _dim(x: Tensor, dim: int, verb: str) -> int:
    if not isinstance(dim, int):
        raise ConfigError(
            f"{verb} takes a number as dim and returns the result, found {type(dim).__name__}. Write "
            f"{_RETURNING[verb]}; torch.distributed.{verb} fills what it is given."
        )
    if not -x.dim() <= dim < x.dim():
        raise ConfigError(f"{verb} along dim {dim} needs a tensor with that dim, found shape {tuple(x.shape)}.")
    return dim % x.dim()


def _split_sizes(length: int, sizes: Sequence[int] | None, parts: int, verb: str) -> list[int]:
    if sizes is None:
        if length % parts:
            raise ConfigError(f"{verb} cannot split {length} evenly for {parts} ranks. Give sizes=[...], one per rank.")
        return [length // parts] * parts
    if len(sizes) != parts or sum(sizes) != length or min(sizes) < 0:
        raise ConfigError(
            f"{verb} needs {parts} sizes, none negative, that add up to {length}, found {list(sizes)}. Correct sizes."
        )
    return list(sizes)
