"""`copy_parts`: copy a model, loss and sample with fake (meta) tensors, so that tracing computes nothing."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from phalanx import accelerator
from phalanx.cluster.proc import available_bytes
from phalanx.errors import ConfigError
from phalanx.i18n import tr
from phalanx.units import format_bytes

Substitute = Callable[[Tensor], Tensor]


def copy_parts(parts: tuple[Any, ...], substitute: Substitute) -> tuple[Any, ...]:
    """Return modules, functions and samples copied, with `substitute` of every tensor in them; tied ones stay tied."""
    # Copying looks an object up by its id first: tensors that are answered there are never copied themselves.
    memo: dict[int, Any] = {id(tensor): substitute(tensor) for tensor in _tensors(parts)}
    return copy.deepcopy(parts, memo)


def separate_tensors(arguments: Any) -> Any:
    """Return arguments in which a tensor that is there twice, as tokens that are labels too often are, is two.

    A loader makes two of it, and a step is to be the same step.
    """
    met: set[int] = set()

    def once(tensor: Tensor) -> Tensor:
        if id(tensor) in met:
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)
        met.add(id(tensor))
        return tensor

    return tree_map_only(Tensor, once, arguments)


def resolve_meta_device(parts: tuple[Any, ...]) -> torch.device:
    """Return where tensors on the meta device are to be taken for: where all others are, or just there.

    So a model that was built without memory is captured with samples that have some, and the reverse.
    """
    real = {tensor.device for tensor in _tensors(parts) if not tensor.is_meta}
    return real.pop() if len(real) == 1 else torch.device("meta")


def make_dummy(meant: torch.device, tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape and dtype, of ones if they are floats or booleans, else of zeros.

    Whole numbers are often indices, for which 0 is always right.

    Args:
        meant: Where it is if the other is on the meta device; else where the other is.
        tensor: The other.
    """
    has_ones = tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool
    device = meant if tensor.is_meta else tensor.device
    values = (torch.ones_like if has_ones else torch.zeros_like)(tensor.detach(), device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(values, requires_grad=tensor.requires_grad)
    return values.requires_grad_(tensor.requires_grad)


def check_dummy_memory(parts: tuple[Any, ...], reason: str) -> None:
    """Check that dummies would not take all memory of this host, which ends processes without a word.

    Args:
        parts: The model first, then all that it takes.
        reason: Why there have to be dummies.

    Raises:
        ConfigError: If there is too little memory for all tensors, and gradients of those that need one.
    """
    tensors = {id(tensor): tensor for tensor in _tensors(parts)}.values()
    needed = sum(tensor.numel() * tensor.element_size() * (2 if tensor.requires_grad else 1) for tensor in tensors)
    available = available_bytes()
    if available is not None and needed > available:
        raise ConfigError(
            tr(
                "capture runs {model} on tensors with the shapes of the sample, and it failed: {why}; dummies would "
                "take {needed} of memory, and {available} are left. Change the code that fails, or take a smaller "
                "model or batch.",
                model=type(parts[0]).__name__,
                why=reason,
                needed=format_bytes(needed, up=True),
                available=format_bytes(available),
            )
        )


def _tensors(parts: tuple[Any, ...]) -> Iterator[Tensor]:
    for part in parts:
        for leaf in _list_tensors(part) if isinstance(part, nn.Module) else tree_leaves(part):
            if isinstance(leaf, Tensor):
                yield leaf


def _list_tensors(model: nn.Module) -> Iterator[Any]:
    yield from model.parameters()
    yield from model.buffers()
    for module in model.modules():
        yield from tree_leaves(list(vars(module).values()))  # tensors that are neither


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Put torch's, Python's and NumPy's random numbers back after the block, which finds the same ones each time."""
    python, numpy = random.getstate(), np.random.get_state()
    with accelerator.fork_random_numbers(accelerator.device_in_use()):
        torch.default_generator.manual_seed(0)  # torch.manual_seed would also seed GPUs, for good
        random.seed(0)
        np.random.seed(0)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
