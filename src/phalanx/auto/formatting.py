"""Parse memory sizes; format percentages and long lists of names, for messages of the planner."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from phalanx.i18n import tr
from phalanx.units import parse_bytes

_MOST_NAMES = 8


def read_size(value: float | str) -> float | None:
    """Return bytes from a number, or from text such as `8GiB`, `8Gi`, `500 MiB` and `8GB`; None if it is neither."""
    if isinstance(value, int | float):
        return None if isinstance(value, bool) else value
    return parse_bytes(str(value), any_case=True)


def format_percent(value: float) -> str:
    """Return a percentage in two digits, or as many as it has before the point."""
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def format_names(names: Collection[str]) -> str:
    """Return names, of many the first."""
    shown, more = ", ".join(islice(names, _MOST_NAMES)), len(names) - _MOST_NAMES
    return tr("{names} and {count} more", names=shown, count=more) if more > 0 else shown
