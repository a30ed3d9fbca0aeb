"""Run something around the forward pass of a module, in place: class, keys and signature stay."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

from torch import nn

Forward = Callable[..., Any]


def wrap_forward(module: nn.Module, around: Callable[..., Any], *settings: Any) -> None:
    """Make a module's forward pass `around(forward, *settings, *inputs, **named inputs)`; the last wrap is outermost.

    Args:
        module: Changed in place. It can still be copied, pickled and compiled; a copy runs its own forward.
        around: A function of a module, so that pickle finds it by name.
        *settings: Passed on; they are copied with the module.
    """
    inner = module.forward
    wrapped: Any = partial(around, inner, *settings)
    module.forward = update_wrapper(wrapped, inner, assigned=("__doc__",), updated=())
