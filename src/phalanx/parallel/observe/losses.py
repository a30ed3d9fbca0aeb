"""`watch_losses`: see the loss of every backward pass, whoever calls it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from phalanx.comm.batch.backward_calls import Backward, BackwardOrder, around_backward
from phalanx.comm.batch.backward_end import is_repeated

_listeners: list[Callable[[Tensor], None]] = []


def watch_losses(listener: Callable[[Tensor], None]) -> None:
    """Call `listener` with the scalar that each backward pass of this process starts from, before it runs.

    A pass that ran out of memory and is repeated counts once.
    """
    _listeners.append(listener)
    around_backward(BackwardOrder.LOSSES, _look)


def _look(backward: Backward, tensors: Tensor | Sequence[Tensor], *args: Any, **options: Any) -> None:
    if not is_repeated():
        for tensor in (tensors,) if isinstance(tensors, Tensor) else tensors:
            if isinstance(tensor, Tensor) and tensor.numel() == 1:
                for listener in tuple(_listeners):
                    listener(tensor)
    backward(tensors, *args, **options)
