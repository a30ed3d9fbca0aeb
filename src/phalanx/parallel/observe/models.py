"""`ModelTracker`: the models that a script calls, the names of their parameters, and the order of their modules."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

_WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Attributes under which wrappers (DDP, torch.compile, checkpointing, FSDP) hold what they wrap."""


def plain_name(name: str) -> str:
    """Return the name of a parameter or module without what wrappers put before or into it."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS[1:]]
    return ".".join(parts)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside of wrappers."""
    while True:
        inside = next((model._modules[key] for key in _WRAPPERS if _is_wrapper(model, key)), None)
        if inside is None:
            return model
        model = inside


def _is_wrapper(model: nn.Module, key: str) -> bool:
    if model._modules.get(key) is None:
        return False
    return key != "module" or (len(model._modules) == 1 and type(model).__module__.startswith("torch."))


def is_called_by_script() -> bool:
    """Return whether a forward pass runs for itself: not traced, nor recomputed inside a backward pass."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() == -1


class ModelTracker:
    """Knows each model that was called to train, by the outermost module of the call."""

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        """Without their wrappers, in the order of their first calls."""

        self.wrappers: list[nn.Module] = []
        """What the script calls: the same, or what wraps them."""

        self._params: dict[int, str] = {}
        self._modules: dict[int, tuple[str, nn.Module]] = {}

    def add(self, root: nn.Module) -> nn.Module | None:
        """Take in the outermost module of a call; return the model if it has parameters that are new."""
        model = unwrapped(root)
        if all(id(param) in self._params for param in model.parameters()):  # none at all, or part of a known model
            return None
        prefix = f"model{len(self.models) + 1}." if self.models else ""
        self.models.append(model)
        self.wrappers.append(root)
        for name, param in model.named_parameters():
            self._params.setdefault(id(param), prefix + plain_name(name))
        for name, module in model.named_modules():
            self._modules[id(module)] = (prefix + plain_name(name), module)
        return model

    def name_of(self, param: Tensor) -> str | None:
        """Return the name of a parameter of one of the models."""
        return self._params.get(id(param))

    def module_name(self, module: nn.Module) -> str | None:
        """Return the path of a module in its model, "" for the model itself; None for others."""
        entry = self._modules.get(id(module))
        return entry[0] if entry is not None and entry[1] is module else None

    def tensors(self) -> Iterator[tuple[str, Tensor, str]]:
        """Yield every parameter and buffer with its name and the class of its module."""
        for number, model in enumerate(self.models):
            prefix = f"model{number + 1}." if number else ""
            for path, module in model.named_modules():
                members = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
                for name, tensor in members:
                    yield prefix + plain_name(f"{path}.{name}".lstrip(".")), tensor, type(module).__name__

    def is_accumulating(self) -> bool:
        """Whether torch's DDP does not reduce gradients now, as inside its `no_sync`."""
        return any(
            isinstance(root, DistributedDataParallel) and not root.require_backward_grad_sync for root in self.wrappers
        )
