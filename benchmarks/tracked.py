"""What a process holds of a model and its optimizer, counted by memory behind the tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from phalanx.parallel.session import applied_to


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return bytes by kind, under the names of `phalanx.plan.memory.Memory`."""
    params = list(model.parameters())
    state = [t for found in optimizer.state_dict()["state"].values() for t in found.values() if isinstance(t, Tensor)]
    waiting = [keeper.state_dict() for keeper in applied_to(model).updaters]
    return {
        "parameters": bytes_of(params),
        "gradients": bytes_of(param.grad for param in params if param.grad is not None),
        "optimizer": bytes_of(state),
        "residuals": bytes_of(t for t in tree_leaves(waiting) if isinstance(t, Tensor)),
    }


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of memory behind tensors, each piece once."""
    storages = {}
    for tensor in tensors:
        if not tensor.is_meta:
            storage = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def saved_bytes(model: nn.Module, inputs: Tensor) -> int:
    """Return the bytes behind what autograd saves in a forward pass, parameters and inputs left out."""
    there = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), inputs)}
    saved: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        model(inputs)
    return bytes_of(tensor for tensor in saved if tensor.untyped_storage().data_ptr() not in there)
