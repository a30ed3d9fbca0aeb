"""Estimate optimizer state and activation memory of a model, for `px.explain`."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from phalanx import accelerator
from phalanx.data.loader.binding import Inputs, call
from phalanx.errors import ConfigError
from phalanx.parallel.data.forward_hooks import buffers_kept
from phalanx.parallel.session import Applied, model_record
from phalanx.parallel.step.norms import local_part
from phalanx.plan.memory import StateOf
from phalanx.plan.shape import ModelShape


def state_of(optimizer: Optimizer) -> StateOf:
    """Return what an optimizer keeps for each parameter.

    Raises:
        ConfigError: If its class is not known.
    """
    options = optimizer.param_groups[0]
    kind = type(optimizer)
    if kind is SGD:
        return StateOf(tensors=bool(options["momentum"]), momentum=bool(options["momentum"]))
    counted = 4  # a float32 number of steps
    if kind in (Adam, AdamW):
        return StateOf(tensors=2 + bool(options["amsgrad"]), scalar_bytes=counted)
    if kind is Adagrad:
        return StateOf(tensors=1, scalar_bytes=counted)
    if kind is RMSprop:
        return StateOf(tensors=1 + bool(options["momentum"]) + bool(options["centered"]), scalar_bytes=counted)
    raise ConfigError(
        f"explain knows what SGD, Adam, AdamW, Adagrad and RMSprop keep, found {kind.__name__}. Leave optimizer out."
    )


def as_trained(shape: ModelShape, model: nn.Module) -> ModelShape:
    """Return the shape a model had with the dtypes that its parameters have now."""
    now = dict(model.named_parameters())
    return ModelShape(
        tuple(
            replace(p, dtype=str(now[p.name].dtype).removeprefix("torch."), item_bytes=now[p.name].element_size())
            for p in shape.params
        )
    )


def is_averaged(model: nn.Module) -> bool:
    """Return whether the strategy keeps an average of a model's weights."""
    return model_record(model).average is not None


def computes_elsewhere(applied: Applied) -> bool:
    """Return whether a forward pass in training does more than this process can count, or may not be tried."""
    is_ours = applied.is_sharded or applied.pipeline is not None or bool(applied.plan.tables)
    return is_ours or applied.plan.step.compiled


def activation_bytes(model: nn.Module, inputs: Inputs) -> int:
    """Return the bytes that one forward pass in training keeps for its backward pass.

    Counted is the memory that its operators made and that is still there when only the graph is. The pass leaves
    buffers, such as batch-norm statistics, and random numbers as they were.

    Args:
        model: Any module that is not compiled, in the mode that is to be measured. Collective if its layers are.
        inputs: Arguments of its forward pass, by position or by name.
    """
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    counter = _AllocationTracker((*model.parameters(), *model.buffers(), *leaves))
    with (
        accelerator.fork_random_numbers(accelerator.device_in_use()),
        torch.enable_grad(),
        buffers_kept(model),
        counter,
    ):
        outputs = call(model, inputs)
    graph = [leaf.grad_fn for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    del outputs
    size = counter.allocated_bytes()
    graph.clear()
    return size


class _AllocationTracker(TorchDispatchMode):
    """Counts the memory that operators make inside the block, behind other tensors than those that are there."""

    def __init__(self, there: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._there = {_storage_of(tensor)._cdata for tensor in there}
        self._made: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = _storage_of(tensor)
                if storage._cdata not in self._there:
                    self._made[storage._cdata] = weakref.ref(storage), storage.nbytes()
        return result

    def allocated_bytes(self) -> int:
        """Return the bytes of what is still in use."""
        gc.collect()
        return sum(size for storage, size in self._made.values() if storage() is not None)


def _storage_of(tensor: Tensor) -> torch.UntypedStorage:
    return local_part(tensor.detach()).untyped_storage()
