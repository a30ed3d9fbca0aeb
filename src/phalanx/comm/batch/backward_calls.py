"""`around_backward`: the one place that wraps `torch.autograd.backward`, for which torch has no hook.

A script calls `loss.backward()` on a tensor of its own, which calls torch's function. Each listener is called with the
call within it, so that it can act before and after, catch errors, or call it again.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from functools import partial, wraps
from typing import Any

import torch

Backward = Callable[..., None]
"""As `torch.autograd.backward`."""

Listener = Callable[..., None]
"""Gets the call within it, and the arguments of `torch.autograd.backward`."""


class BackwardOrder(IntEnum):
    """Who listens to backward passes, the outermost first."""

    MEANS = 0
    """Checks what a pass starts from, once for each: outside of its repetitions."""

    MEMORY = 1
    """Repeats a pass that ran out of memory."""

    LOSSES = 2
    """Looks at what a pass starts from. Within the repetitions, of which it leaves out all but the first."""


class _Calls:
    """The function that stands in the place of torch's, and what it calls."""

    def __init__(self) -> None:
        self.listeners: dict[BackwardOrder, Listener] = {}
        self.chain: Backward | None = None
        self.installed: Backward | None = None
        self.torch_backward: Backward = torch.autograd.backward


_calls = _Calls()


def around_backward(order: BackwardOrder, listener: Listener) -> None:
    """Call `listener(backward, tensors, ...)` in place of `backward(tensors, ...)` at every backward pass from now on.

    Again is no matter. Compiled code is left alone.

    Args:
        order: Which listener it is, and so between which others it stands.
        listener: Calls `backward`, or raises.
    """
    if _calls.installed is None or torch.autograd.backward is _calls.torch_backward:  # someone has put torch's back
        _install()
    if _calls.listeners.get(order) is listener:
        return
    _calls.listeners[order] = listener
    chain = _calls.torch_backward
    for at in sorted(_calls.listeners, reverse=True):
        chain = partial(_calls.listeners[at], chain)
    _calls.chain = chain


def _install() -> None:
    _calls.torch_backward = torch.autograd.backward

    @wraps(_calls.torch_backward)
    def backward(tensors: Any, *args: Any, **options: Any) -> None:
        if torch.compiler.is_compiling() or _calls.chain is None:
            _calls.torch_backward(tensors, *args, **options)
        else:
            _calls.chain(tensors, *args, **options)

    _calls.installed = torch.autograd.backward = backward
