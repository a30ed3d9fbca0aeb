"""Parse and format byte sizes and durations: `8GiB`, `1.5 ms` (pure)."""

from __future__ import annotations

import math
import re

GIB, MIB = 2**30, 2**20
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kKMGTmgt])(i?))?[bB]?")


def parse_bytes(text: str, *, any_case: bool = False) -> float | None:
    """Return the bytes of an amount such as `8GiB`, `8Gi`, `500 MiB`, `8GB` or `1024`; None if it is none.

    Units with an i are powers of 1024, others of 1000.

    Args:
        text: What was written.
        any_case: Whether `8gib` is one too; a lowercase `m` alone means a thousandth to Kubernetes.
    """
    match = _AMOUNT.fullmatch(text.strip())
    if match is None or not (any_case or (match[2] or "k") in "kMGT" or match[2] + match[3] == "Ki"):
        return None
    power = "kmgt".index(match[2].lower()) + 1 if match[2] else 0
    size: float = float(match[1]) * (1024 if match[3] else 1000) ** power
    return size


def format_bytes(size: float, *, up: bool = False) -> str:
    """Return bytes with the unit that suits them.

    Args:
        size: Bytes.
        up: Whether the number is rounded up, so that it is enough.
    """
    for unit, scale in (("GiB", GIB), ("MiB", MIB)):
        if size >= scale:
            return f"{_digits(size / scale, up):.4g} {unit}"  # enough to tell what is needed from what there is
    return f"{_digits(size / 2**10, up):.4g} KiB" if up else f"{size / 2**10:.3g} KiB"


def format_gib(size: float) -> str:
    """Return bytes as GiB with one digit, for columns of amounts that are compared."""
    return f"{size / GIB:.1f} GiB"


def format_mb(size: int) -> str:
    """Return bytes as MB, as downloads and file managers count them."""
    return f"{size / 1e6:.1f} MB"


def format_seconds(seconds: float) -> str:
    """Return seconds with the unit that suits them."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale or not seconds:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds * 1e6:.4g} µs"


def format_length(seconds: float, *, digits: int = 0) -> str:
    """Return a length of time as `12 s`, `3:07` or `2:03:07`.

    Args:
        seconds: The length.
        digits: Of a length below a minute, behind the point.
    """
    if seconds < 60:
        return f"{max(0.0, seconds if digits else int(seconds)):.{digits}f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _digits(value: float, up: bool) -> float:
    """Return a value, with four digits and no less where it is to be rounded up."""
    if not up or not value:
        return value
    step = 10.0 ** (math.floor(math.log10(value)) - 3)
    return math.ceil(value / step * (1 - 1e-12)) * step
