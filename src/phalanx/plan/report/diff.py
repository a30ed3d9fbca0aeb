"""`diff`: difference of two Plans, rule by rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from phalanx.plan.files import non_defaults
from phalanx.plan.value import Plan

_KEYS = ("match", "name", "site")
"""Fields by which the same rule, axis, table or operator of two Plans is known."""


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that two Plans say differently."""

    where: str
    """Such as `mesh[data].size` or `params[classifier.0.weight].update`."""

    before: Any
    """What the first says; None if nothing, which is the default."""

    after: Any

    def __str__(self) -> str:
        return f"{self.where}: {_format_value(self.before)} -> {_format_value(self.after)}"


def diff(before: Plan, after: Plan) -> tuple[Change, ...]:
    """Return what another Plan says differently, in the order of a Plan's fields; reasons do not count. Pure.

    Rules are compared by what they match. Their order counts too, as the last that matches wins.
    """
    return tuple(
        _changes("", *(_keyed(non_defaults(plan.model_copy(update={"because": ()}))) for plan in (before, after)))
    )


def _changes(where: str, before: Any, after: Any) -> Iterator[Change]:
    if _is_keyed(before) or _is_keyed(after):
        before, after = before or {}, after or {}
        old_order, new_order = (
            [name for name in rules if name in before and name in after] for rules in (before, after)
        )
        if old_order != new_order:
            yield Change(f"{where} in order", old_order, new_order)
    if not (isinstance(before, dict) and isinstance(after, dict)):
        if before != after:
            yield Change(where, before, after)
        return
    for name in dict.fromkeys((*before, *after)):
        inner = name if name.startswith("[") or not where else f".{name}"
        yield from _changes(f"{where}{inner}", before.get(name), after.get(name))


def _is_keyed(value: Any) -> bool:
    return isinstance(value, dict) and any(name.startswith("[") for name in value)


def _keyed(value: Any) -> Any:
    """Return a value in which lists of named parts are dictionaries by `[name]`; of several the last, which wins."""
    if isinstance(value, dict):
        return {name: _keyed(item) for name, item in value.items()}
    if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
        key = next((key for key in _KEYS if all(key in part for part in value)), None)
        if key is not None:
            return {f"[{part[key]}]": {n: _keyed(v) for n, v in part.items() if n != key} for part in value}
    return value


def _format_value(value: Any) -> str:
    if value is None:
        return "default"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name.strip('[]')}: {_format_value(item)}" for name, item in value.items()) + "}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
