"""`whole_norms`: norms of sharded tensors, with one all-reduce per group."""

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
from phalanx.parallel.step.square_sums import SquareSums

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
    """Return Euclidean norms that have the same bits however each tensor is split over ranks."""
    squares = SquareSums(tensors)
    largest = _over_groups(squares.largest().nan_to_num(math.inf, math.inf), "max", groups)
    sums = squares.rounded(largest, _over_groups(squares.counts(), "sum", groups))
    if any(groups):
        sums = torch.stack([_over_groups(level, "sum", groups) for level in sums])
    norms = torch.where(largest.isfinite(), sums.sum(0).sqrt().nan_to_num(math.inf), largest)
    return norms.to(dtype)


def _over_groups(values: Tensor, how: Literal["sum", "max"], groups: Sequence[tuple[Group, ...]]) -> Tensor:
    """Combine one number for each tensor over the groups over which it is split. Collective over these."""
    if not any(groups):
        return values
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
