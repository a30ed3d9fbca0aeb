"""`watch_losses`: see the loss of every backward pass, whoever calls it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from phalanx.comm.batch.backward_end import is_repeated

_listeners: list[Callable[[Tensor], None]] = []


def watch_losses(listener: Callable[[Tensor], None]) -> None:
    """Call `listener` with the scalar that each backward pass of this process starts from, before it runs.

    A pass that ran out of memory and is repeated counts once.

    Torch has no hook for it; `Tensor.backward` calls `torch.autograd.backward`, which is wrapped.
    """
    if not _listeners:
        _wrap_backward()
    _listeners.append(listener)


def _wrap_backward() -> None:
    backward: Any = torch.autograd.backward
    if hasattr(backward, "_watches_losses"):
        return

    @wraps(backward)
    def watching(tensors: Tensor | Sequence[Tensor], *args: Any, **options: Any) -> None:
        if _listeners and not torch.compiler.is_compiling() and not is_repeated():
            for tensor in (tensors,) if isinstance(tensors, Tensor) else tensors:
                if isinstance(tensor, Tensor) and tensor.numel() == 1:
                    for listener in tuple(_listeners):
                        listener(tensor)
        backward(tensors, *args, **options)

    watching._watches_losses = True  # type: ignore[attr-defined]
    torch.autograd.backward = watching  # type: ignore[assignment]
