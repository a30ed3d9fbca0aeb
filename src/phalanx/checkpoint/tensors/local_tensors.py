"""`ModelView`: the local shards of a model and its optimizer, as chunks of full tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import phalanx.comm.context as context_of
from phalanx.checkpoint.tensors.chunk import TensorChunk
from phalanx.checkpoint.tensors.names import inner, without_wrappers
from phalanx.checkpoint.tensors.safetensors_file import dtype_name
from phalanx.checkpoint.tensors.write_plan import ChunkDescription
from phalanx.errors import ConfigError
from phalanx.parallel.model_shape import is_handle, is_module_held
from phalanx.parallel.session import applied_to
from phalanx.plan.mesh import Position
from phalanx.plan.value import Average, OnRanks, Plan, Shard

MODEL, OPTIMIZER, AVERAGE, RANKS = "model/", "optimizer/", "ema/", "ranks/"
"""Prefixes of the names of tensors in a checkpoint: the model's, its optimizer's, those of a running average of the
model, and one rank's own."""


@dataclass(frozen=True, slots=True)
class Placement:
    """How a parameter, and optimizer state of its shape, is placed on the ranks."""

    slices: tuple[tuple[int, int, int], ...] = ()
    """Sharded by its layer: (dim, index of this rank's slice, number of slices)."""

    is_per_rank: bool = False
    """Whether every rank holds its own tensor: a different one, or a shard of unknown layout."""


REPLICATED = Placement()


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """One tensor as this rank holds it."""

    tensor: Tensor
    """Its memory: the local part of a sharded one."""

    part: ChunkDescription


class ModelView:
    """A model's tensors by plain name, and how each is placed on the ranks."""

    def __init__(self, model: nn.Module) -> None:
        self.model = inner(model)
        applied = applied_to(self.model) or applied_to(model)
        self._plan: Plan | None = applied.plan if applied else None
        self._has_stages = applied is not None and applied.pipeline is not None
        context = context_of.current()
        self.rank = context.rank
        self._position = Position(self._plan.mesh, context.rank) if self._plan else None
        self.tensors: dict[str, Tensor] = {}
        self.values: dict[str, Any] = {}
        """Extra state of modules: whatever `get_extra_state` returns."""

        self.aliases: dict[str, str] = {}
        """Further names of tensors with several names."""

        self._read()
        # Parameters in a table or of another stage are not among these, but optimizers may hold them.
        self.names = {id(param): without_wrappers(name) for name, param in self.model.named_parameters()}
        self.names |= {id(tensor): name for name, tensor in self.tensors.items()}

    @property
    def averages_parameters(self) -> bool:
        """Whether ranks take local steps, so that each holds its own parameters."""
        return self._plan is not None and any(isinstance(rule.update, Average) for rule in self._plan.params)

    def _read(self) -> None:
        first: dict[int, str] = {}
        for key, value in self.model.state_dict(keep_vars=True).items():
            name = without_wrappers(key)
            if not isinstance(value, Tensor) or name.rpartition(".")[2] == "_extra_state":
                self.values[name] = value
            elif is_handle(value) or (value.is_meta and self._has_stages):
                continue  # its rows are in a table; it is of a stage that other ranks hold
            elif id(value) in first:
                self.aliases[name] = first[id(value)]
            else:
                first[id(value)] = name
                self.tensors[name] = value

    def placement(self, name: str) -> Placement:
        """Return how a tensor of the model is placed on the ranks."""
        tensor = self.tensors[name]
        is_param = isinstance(tensor, nn.Parameter)
        rule = self._plan.rule_for(name) if self._plan and is_param else None
        is_statistic = not is_param and tensor.is_floating_point() and self.averages_parameters
        if is_statistic or (rule is not None and isinstance(rule.update, Average)):
            return Placement(is_per_rank=True)
        if not is_module_held(tensor):
            return REPLICATED
        if rule is None or self._position is None or not isinstance(rule.place, OnRanks):
            return Placement(is_per_rank=context_of.current().is_distributed)
        axes: dict[int, list[str]] = {}
        for axis, placed in rule.place.layout.items():
            if isinstance(placed, Shard):
                axes.setdefault(placed.dim % tensor.ndim, []).append(axis)
        if not axes:
            return Placement(is_per_rank=context_of.current().is_distributed)
        position = self._position
        return Placement(tuple((dim, position.index(on), position.count(on)) for dim, on in sorted(axes.items())))

    def local_tensors(self) -> Iterator[tuple[str, LocalTensor]]:
        """Yield the model's tensors by their names in a checkpoint."""
        for name, tensor in self.tensors.items():
            is_param = isinstance(tensor, nn.Parameter)
            yield self.locate(MODEL + name, tensor, self.placement(name), split=is_param)

    def locate(self, name: str, tensor: Tensor, placement: Placement, *, split: bool = True) -> tuple[str, LocalTensor]:
        """Return a tensor as this rank holds it, by its name in a checkpoint.

        Args:
            name: Its name when it is one tensor for all ranks.
            tensor: What this rank holds.
            placement: How it is placed on the ranks. A DTensor adds its own placements.
            split: Whether several ranks may share the writing.
        """
        if isinstance(tensor, DTensor):
            if placement.is_per_rank:
                raise ConfigError(
                    f"{name!r} is sharded by its layer in an unknown layout, and its slices are sharded again. Set its "
                    'layout in the Plan (managed = "module"), or save without sharding.'
                )
            return name, _local_dtensor(name, tensor, placement.slices)
        local = local_tensor(name, tensor, placement.slices, split=split or placement.is_per_rank)
        return rank_name(self.rank, name) if placement.is_per_rank else name, local

    def average_tensors(self, shadow: Mapping[str, Tensor]) -> Iterator[tuple[str, LocalTensor]]:
        """Yield the tensors of a running average of the model, which are placed as the model's own."""
        for name, tensor in shadow.items():
            if name not in self.tensors:
                continue
            placement = self.placement(name)
            yield self.locate(AVERAGE + name, tensor, placement, split=isinstance(self.tensors[name], nn.Parameter))

    def optimizer_tensors(self, state: Mapping[str, Any]) -> Iterator[tuple[str, LocalTensor]]:
        """Yield tensors of optimizer state by their names in a checkpoint.

        Args:
            state: By parameter name, by key.
        """
        for name, entries in state.items():
            param = self.tensors.get(name)
            if param is None:
                continue  # its state is in the table
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    yield self.locate(f"{OPTIMIZER}{name}/{key}", value, self._placement_of_state(name, param, value))

    def _placement_of_state(self, name: str, param: Tensor, value: Tensor) -> Placement:
        placement = self.placement(name)
        is_alike = value.shape == param.shape
        if placement.slices and not is_alike:
            # A scalar of the full parameter is the same everywhere; factors of a slice belong to that slice.
            return REPLICATED if value.ndim == 0 else Placement(is_per_rank=True)
        if isinstance(param, DTensor) and not isinstance(value, DTensor) and value.ndim:
            return Placement(is_per_rank=True)
        return placement


def rank_name(rank: int, name: str) -> str:
    """Return the name of one rank's own tensor."""
    return f"{RANKS}{rank}/{name}"


def local_tensor(
    name: str, tensor: Tensor, slices: tuple[tuple[int, int, int], ...] = (), *, split: bool = True
) -> LocalTensor:
    """Return a plain tensor as a local tensor: full, or a slice to be concatenated with those of other ranks.

    Raises:
        ConfigError: If it has no plain memory, or a dtype that files do not have; names it.
    """
    data = tensor.detach()
    if data.layout is not torch.strided or data.is_quantized or data.is_meta:
        raise ConfigError(
            f"{name!r} of shape {list(data.shape)} is {'meta' if data.is_meta else data.layout}, and only dense "
            "tensors can be saved. Make it dense, or register it with persistent=False."
        )
    shape = tuple(data.shape)
    part = ChunkDescription(
        dtype_name(name, data.dtype), data.dtype.itemsize, TensorChunk.full(shape), shape, slices, split
    )
    return LocalTensor(data, part)


def _local_dtensor(name: str, tensor: DTensor, slices: tuple[tuple[int, int, int], ...]) -> LocalTensor:
    if any(placement.is_partial() for placement in tensor.placements):
        raise ConfigError(f"{name!r} is a partial sum ({tensor.placements}). Save after the step.")
    # As torch's own checkpoint planners do: covers uneven and strided shards.
    (chunk,) = tensor.__create_chunk_list__()
    chunk = TensorChunk(tuple(chunk.offsets), tuple(chunk.sizes))
    part = ChunkDescription(dtype_name(name, tensor.dtype), tensor.dtype.itemsize, chunk, tuple(tensor.shape), slices)
    with torch.no_grad():
        return LocalTensor(tensor.to_local(), part)
