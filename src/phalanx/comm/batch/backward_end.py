"""`at_backward_end`: call functions when the backward pass that runs ends, also one repeated after an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

Action = Callable[[], None]

_waiting: list[Action] = []
"""What the end of the backward pass that runs calls. Torch forgets it when an error ends the pass."""

_is_repeated = False


def at_backward_end(action: Action) -> None:
    """Call a function in the thread that called backward, once its last gradient has been accumulated."""
    if action not in _waiting:  # else one that raised has left it
        _waiting.append(action)
    torch.autograd.Variable._execution_engine.queue_callback(partial(_run, action))


def _run(action: Action) -> None:
    if action in _waiting:
        _waiting.remove(action)
        action()


def forget_interrupted() -> None:
    """Forget what a backward pass that raised has left."""
    _waiting.clear()


@contextmanager
def repeated_pass() -> Iterator[None]:
    """Let backward passes in the block continue with the one that an error ended before; it ends with the block."""
    global _is_repeated
    _is_repeated = True
    try:
        yield
        for action in tuple(_waiting):
            _run(action)
    finally:
        _is_repeated = False


def is_repeated() -> bool:
    """Return whether the backward pass that runs continues with one that an error ended."""
    return _is_repeated
