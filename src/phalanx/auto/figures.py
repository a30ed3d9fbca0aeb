"""Seconds, bytes and lists of names as people read them, in the language of the user."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from phalanx.cluster.devices import GIB
from phalanx.cluster.messages import text

_MOST_NAMES = 8


def in_words(seconds: float) -> str:
    """Return seconds with the unit that suits them."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size or not seconds:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds * 1e6:.4g} µs"


def size_in_words(size: float) -> str:
    """Return bytes with the unit that suits them."""
    if size >= GIB:
        return f"{size / GIB:.4g} GiB"  # digits enough to tell what is needed from what there is
    return f"{size / 2**20:.4g} MiB" if size >= 2**20 else f"{size / 2**10:.3g} KiB"


def some(names: Collection[str]) -> str:
    """Return names, of many the first."""
    shown, more = ", ".join(islice(names, _MOST_NAMES)), len(names) - _MOST_NAMES
    return text("and more", names=shown, count=more) if more > 0 else shown
