"""Norms of sharded tensors, with one all-reduce per group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

import phalanx.comm.context as context_of
from phalanx.comm.collectives import all_reduce
from phalanx.comm.groups import Group
from phalanx.errors import ConfigError
from phalanx.parallel.model_shape import held_over, is_module_held
from phalanx.parallel.session import session

if TYPE_CHECKING:  # slow to import, and a job without it has no such tensor
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether torch knows this tensor as spread over a mesh; without the import, which is slow."""
    return hasattr(tensor, "placements")


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, sharing its memory. Call it without gradients."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def shard_groups(tensor: Tensor) -> tuple[Group, ...]:
    """Return the groups over whose ranks a tensor is spread; none when every rank holds all of it."""
    if is_dtensor(tensor):
        session.has_norms_of_shards = True
        mesh, placements = tensor.device_mesh, tensor.placements
        cut = tuple(mesh.get_group(dim) for dim, placement in enumerate(placements) if not placement.is_replicate())
        return cut + _layer_groups(tensor)
    return _layer_groups(tensor)


def _layer_groups(tensor: Tensor) -> tuple[Group, ...]:
    """Return the group over which a layer holds a parameter, whatever else it is spread over."""
    return (held_over(tensor),) if is_module_held(tensor) and dist.is_initialized() else ()


@torch.no_grad()
def gradient_of(param: Tensor) -> tuple[Tensor, tuple[Group, ...]] | None:
    """Return what this rank holds of a parameter's gradient, and the groups over which the rest is spread.

    Collective over the mesh of a parameter whose gradient is still a sum to be made (torch's Partial placement); it is
    made, and becomes the parameter's gradient.
    """
    grad = param.grad
    if grad is None:
        return None
    if not is_dtensor(grad):
        return grad, shard_groups(param)
    if any(placement.is_partial() for placement in grad.placements):
        assert is_dtensor(param)
        grad = param.grad = grad.redistribute(param.device_mesh, param.placements)
    return local_part(grad), shard_groups(grad) + _layer_groups(param)


@torch.no_grad()
def whole_norms(tensors: Sequence[Tensor], groups: Sequence[tuple[Group, ...]], order: float = 2.0) -> Tensor:
    """Return the norm of each whole tensor.

    Collective over every group that is named, in the order of first appearance; no communication when none is.

    Args:
        tensors: What this rank holds of each; at least one, plain tensors, any floating dtypes and devices.
        groups: For each tensor the groups over which the rest is spread.
        order: A positive number, or infinity for the largest magnitude.

    Returns:
        Shape (number of tensors,), float32, or float64 if a tensor is; on the first tensor's device.
    """
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    has_replicas = context_of.is_initialized() and context_of.current().replicas is not None
    if has_replicas and order not in (2.0, math.inf) and any(groups):
        raise ConfigError(
            f"a norm of order {order:g} of sharded tensors has other bits on other numbers of ranks, and logical "
            "replicas were asked for. Use norm_type 2 or inf."
        )
    if order == 2.0 and _has_exact_norms():
        return _norms_of_any_split(tensors, groups, dtype)
    norms = _local_norms(tensors, order, dtype)
    largest = math.isinf(order)
    for alike in _by_ranks(groups):
        mine = [i for i, spread in enumerate(groups) if any(group in alike for group in spread)]
        members, group = torch.tensor(mine, device=norms.device), alike[0]
        if largest:
            # The order of a NaN is not defined, so backends disagree about the maximum of one.
            part = all_reduce(norms[members].nan_to_num(math.inf, math.inf), "max", group=group)
        else:
            part = all_reduce(norms[members] ** order, "sum", group=group) ** (1.0 / order)
        norms[members] = part
    return norms


def _has_exact_norms() -> bool:
    """Return whether norms have to be the same however tensors are split."""
    replicas = context_of.current().replicas if context_of.is_initialized() else None
    return replicas is not None and not replicas.were_ranks  # ranks have rounded theirs


def _norms_of_any_split(tensors: Sequence[Tensor], groups: Sequence[tuple[Group, ...]], dtype: torch.dtype) -> Tensor:
    """Return Euclidean norms that have the same bits however each tensor is split over ranks.

    Squares are rounded to multiples of a power of two that is so large that no sum of them is rounded; so are the
    remainders (Demmel and Nguyen, "Fast Reproducible Floating-Point Summation", ARITH 2013).
    """
    device = tensors[0].device
    largest = torch.stack([t.detach().abs().max().double() if t.numel() else t.new_zeros(()).double() for t in tensors])
    counts = torch.tensor([float(t.numel()) for t in tensors], dtype=torch.float64, device=device)
    largest = _over_groups(largest.to(device).nan_to_num(math.inf, math.inf), "max", groups)
    counts = _over_groups(counts, "sum", groups)
    tops, sizes = torch.frexp(largest.square()).exponent.tolist(), torch.frexp(counts).exponent.tolist()
    parts = [_rounded_sums(t, top, size) for t, top, size in zip(tensors, tops, sizes, strict=True)]
    sums = torch.stack([part.to(device) for part in parts])
    sums = torch.stack([_over_groups(sums[:, level].contiguous(), "sum", groups) for level in (0, 1)])
    norms = torch.where(largest.isfinite(), sums.sum(0).sqrt(), largest)
    return norms.to(dtype)


def _rounded_sums(tensor: Tensor, top: int, size: int) -> Tensor:
    """Return two exact sums, shape (2,): of squares below 2**top, `size` bits of them, and of what rounding left."""
    rest, sums = tensor.detach().double().square(), []
    for _ in range(2):
        shift = 1.5 * 2.0 ** (top + size)
        rounded = (rest + shift) - shift
        sums.append(rounded.sum())
        rest, top = rest - rounded, top + size - 53
    return torch.stack(sums)


def _over_groups(values: Tensor, how: Literal["sum", "max"], groups: Sequence[tuple[Group, ...]]) -> Tensor:
    """Combine one number for each tensor over the groups over which it is split. Collective over these."""
    values = values.clone()
    for alike in _by_ranks(groups):
        mine = [i for i, spread in enumerate(groups) if any(group in alike for group in spread)]
        members = torch.tensor(mine, device=values.device)
        values[members] = all_reduce(values[members], how, group=alike[0])
    return values


def _by_ranks(groups: Sequence[tuple[Group, ...]]) -> list[list[Group]]:
    """Return the groups that are named, those of the same ranks together, in the order of first appearance.

    Torch makes each mesh groups of its own, and may give a gradient an equal mesh that was there before: which of the
    two depends on the shapes that a rank holds, and so would the order of collectives.
    """
    by_ranks: dict[tuple[int, ...], list[Group]] = {}
    for group in dict.fromkeys(group for spread in groups for group in spread):
        by_ranks.setdefault(tuple(dist.get_process_group_ranks(group)), []).append(group)
    return list(by_ranks.values())


def over_stages(norm: Tensor, groups: Sequence[Group], order: float) -> Tensor:
    """Return the norm over all stages of a model from that of this rank's. Collective over these groups."""
    for group in groups:
        if math.isinf(order):
            # As above: the maximum of a NaN is not defined.
            whole = all_reduce(norm.double().nan_to_num(math.inf, math.inf), "max", group=group)
        else:
            whole = all_reduce(norm.double() ** order, "sum", group=group) ** (1.0 / order)
        norm = whole.to(norm.dtype)
    return norm


def _local_norms(tensors: Sequence[Tensor], order: float, dtype: torch.dtype) -> Tensor:
    result: list[Tensor] = [torch.zeros(())] * len(tensors)
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.numel():  # the largest of nothing is an error to torch
            alike.setdefault((tensor.device, tensor.dtype), []).append(index)
    for (_, own), members in alike.items():
        wide = torch.promote_types(own, torch.float32)
        norms = torch._foreach_norm([tensors[index] for index in members], order, dtype=wide)
        for index, norm in zip(members, norms, strict=True):
            result[index] = norm
    return torch.stack([norm.to(tensors[0].device, dtype) for norm in result])
