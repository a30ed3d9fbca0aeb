"""Seconds, bytes and lists of names as people read them, in the language of the user."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from itertools import islice

from phalanx.cluster.messages.messages import text
from phalanx.cluster.spec.devices import GIB

_MOST_NAMES = 8


def in_words(seconds: float) -> str:
    """Return seconds with the unit that suits them."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size or not seconds:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds * 1e6:.4g} µs"


def size_in_words(size: float, *, up: bool = False) -> str:
    """Return bytes with the unit that suits them.

    Args:
        size: Bytes.
        up: Whether what is said is to be no less than they are.
    """
    for unit, one in (("GiB", GIB), ("MiB", 2**20)):
        if size >= one:
            return f"{_digits(size / one, up):.4g} {unit}"  # enough to tell what is needed from what there is
    return f"{_digits(size / 2**10, up):.4g} KiB" if up else f"{size / 2**10:.3g} KiB"


def read_size(said: float | str) -> float | None:
    """Return bytes from a number, or from words such as `8GiB`, `8Gi`, `500 MiB` and `8GB`; None if it is neither.

    Units with an i are powers of 1024, others of 1000.
    """
    if isinstance(said, int | float):
        return None if isinstance(said, bool) else said
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?", str(said).strip().lower())
    if found is None:
        return None
    number, unit, binary = found.groups()
    size: float = float(number) * (1024 if binary else 1000) ** ("kmgt".index(unit) + 1 if unit else 0)
    return size


def _digits(value: float, up: bool) -> float:
    """Return a value, with four digits and no less where it is to be rounded up."""
    if not up or not value:
        return value
    step = 10.0 ** (math.floor(math.log10(value)) - 3)
    return math.ceil(value / step * (1 - 1e-12)) * step


def percent(value: float) -> str:
    """Return a percentage in two digits, or as many as it has before the point."""
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def some(names: Collection[str]) -> str:
    """Return names, of many the first."""
    shown, more = ", ".join(islice(names, _MOST_NAMES)), len(names) - _MOST_NAMES
    return text("and more", names=shown, count=more) if more > 0 else shown
