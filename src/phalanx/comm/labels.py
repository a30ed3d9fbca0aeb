"""`label_calls`: labels of collectives, such as "gradients of bucket 3", which ranks compare and error messages name.

Two calls of the same verb, dtype and length are the same call to a backend, also where one rank gathers the weights of
one layer and another rank those of another. Who knows what a call is for says so here, and torch makes the call far
below, in the same thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


class _Here(threading.local):
    label = ""


_here = _Here()


def current_label() -> str:
    """Return what this thread's collectives are for, "" where nobody said."""
    return _here.label


@contextlib.contextmanager
def label_calls(label: str) -> Iterator[None]:
    """Say what the collectives that this thread issues inside the block are for.

    Ranks that issue a call under different labels get an error that names both, where they share memory. It costs
    nothing else, and means nothing to other backends.

    Args:
        label: A few words that are the same on every rank, such as "the weights of layers.1".
    """
    before = _here.label
    _set(label)
    try:
        yield
    finally:
        _set(before)


def _set(label: str) -> None:
    _here.label = label
    if (say := _native()) is not None:
        say(label)


def _native() -> Callable[[str], None] | None:
    try:
        from phalanx._core import SharedGroup
    except ImportError:
        return None  # groups use gloo then, which compares nothing
    return SharedGroup.label_calls
