"""`wrap_forward`: run code around a module's forward pass, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, update_wrapper
from typing import Any

from torch import nn

from phalanx.parallel.data.bucket_buffers import stored

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


def wrap_innermost_forward(module: nn.Module, around: Callable[..., Any], *settings: Any) -> None:
    """Do what `wrap_forward` does, but inside all wraps that are there, in the place of the module's own forward."""
    innermost: Any = module.__dict__.get("forward")
    while isinstance(innermost, partial) and isinstance(innermost.args[0], partial):
        innermost = innermost.args[0]
    if not isinstance(innermost, partial):
        wrap_forward(module, around, *settings)
        return
    own, *others = innermost.args
    wrapped: Any = partial(around, own, *settings)
    innermost.__setstate__(  # type: ignore[attr-defined]
        (innermost.func, (wrapped, *others), innermost.keywords, innermost.__dict__)
    )


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Give a module its buffers back as they were before the block, also those that its forward pass assigns anew."""
    before = [
        (owner, name, buffer, stored(buffer.detach()).clone())
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for owner, name, buffer, value in before:
            stored(buffer.data).copy_(
                value
            )  # .data leaves the version counter alone: a graph may have saved the buffer
            owner._buffers[name] = buffer
