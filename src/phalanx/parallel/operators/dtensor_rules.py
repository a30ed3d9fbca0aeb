"""`outputs_of`: query DTensor's sharding propagation: which output placements an operator supports, without devices.

An operator is given as torch's own: its function, and arguments in which every tensor is a `DTensorSpec`. DTensor says
how outputs lie that are computed from inputs that lie so, and whether inputs would have to be moved before.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

_MOST_INPUTS = 4
"""Tensors of an operator up to which all their layouts are tried."""


def spec_of(mesh: DeviceMesh, shape: Sequence[int], dtype: torch.dtype) -> DTensorSpec:
    """Return a tensor that every rank of a mesh of one axis holds whole."""
    strides = torch.empty(tuple(shape), device="meta").stride()
    return DTensorSpec(mesh, (Replicate(),), tensor_meta=TensorMeta(torch.Size(shape), strides, dtype))


def bare_mesh(ranks: int) -> DeviceMesh:
    """Return a mesh of one axis that only answers questions: no process group is behind it."""
    return DeviceMesh("cpu", list(range(ranks)), _init_backend=False, _rank=0)


def with_placement(spec: DTensorSpec, placement: Placement) -> DTensorSpec:
    """Return a tensor that lies as told."""
    return DTensorSpec(spec.mesh, (placement,), tensor_meta=spec.tensor_meta)


def with_placements(args: Any, kwargs: Any, chosen: Sequence[Placement]) -> tuple[Any, Any]:
    """Return arguments whose tensors lie as told, in order."""
    leaves, tree = tree_flatten((args, kwargs))
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, DTensorSpec)]
    for index, placement in zip(places, chosen, strict=True):
        leaves[index] = with_placement(leaves[index], placement)
    moved: tuple[Any, Any] = tree_unflatten(leaves, tree)
    return moved


def outputs_of(func: Any, args: Any, kwargs: Any, *, moves: bool = True) -> tuple[DTensorSpec | None, ...] | None:
    """Return how DTensor lays out an operator's outputs; None if it has no rule, or would move inputs and must not."""
    answer = _propagate_sharding(func, args, kwargs)
    return None if answer is None or (answer[1] and not moves) else answer[0]


def inputs_for(func: Any, args: Any, kwargs: Any, output: Placement) -> list[Placement] | None:
    """Return how an operator's tensors must lie so that it computes all its outputs as wanted, and moves nothing.

    Returns:
        A placement for each tensor of the arguments, in order: of those that do, the one that moves the fewest
        elements to get there. None if there is none.
    """
    now = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DTensorSpec)]
    if not 0 < len(now) <= _MOST_INPUTS:
        return None
    for chosen in _by_elements(now):
        answer = _propagate_sharding(func, *with_placements(args, kwargs, chosen))
        if answer is None:
            continue
        outputs, moves = answer
        if not moves and outputs and all(spec is not None and spec.placements == (output,) for spec in outputs):
            return list(chosen)
    return None


def _by_elements(now: Sequence[DTensorSpec]) -> list[tuple[Placement, ...]]:
    """Return all ways in which tensors may lie, those that move the fewest elements first."""
    every = [
        [spec.placements[0], *(placement for placement in _placements(spec) if placement != spec.placements[0])]
        for spec in now
    ]

    def moved_elements(chosen: tuple[Placement, ...]) -> int:
        pairs = zip(now, chosen, strict=True)
        return sum(s.shape.numel() for s, c in pairs if c != s.placements[0] and not s.placements[0].is_replicate())

    return sorted(itertools.product(*every), key=moved_elements)


def _placements(spec: DTensorSpec) -> Iterator[Placement]:
    yield Replicate()
    yield from (Shard(dim) for dim in range(len(spec.shape)))


def _propagate_sharding(func: Any, args: Any, kwargs: Any) -> tuple[tuple[DTensorSpec | None, ...], bool] | None:
    """Return how outputs lie, and whether inputs are moved; None if DTensor has no rule for the operator there."""
    rules = DTensor._op_dispatcher.sharding_propagator
    try:
        schema = OpSchema(func, args, kwargs)
        answer = rules.propagate_op_sharding_non_cached(schema)
    except (NotImplementedError, RuntimeError, AssertionError):  # no rule; none for such inputs; a rule that fails
        return None
    specs = answer.output_spec
    outputs: tuple[DTensorSpec | None, ...] = tuple(specs) if isinstance(specs, list | tuple) else (specs,)
    moved = answer.redistribute_schema if answer.needs_redistribute else None  # of views, for their sizes alone
    return outputs, moved is not None and _lying(moved) != _lying(schema)


def _lying(call: OpSchema) -> list[tuple[Placement, ...]]:
    leaves = tree_leaves((call.args_schema, call.kwargs_schema))
    return [leaf.placements for leaf in leaves if isinstance(leaf, DTensorSpec)]
