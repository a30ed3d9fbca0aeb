"""How two Plans differ, rule by rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from phalanx.plan.files import decided
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
        return f"{self.where}: {_said(self.before)} -> {_said(self.after)}"


def diff(one: Plan, other: Plan) -> tuple[Change, ...]:
    """Return what another Plan says differently, in the order of a Plan's fields; reasons do not count. Pure.

    Rules are compared by what they match. Their order counts too, as the last that matches wins.
    """
    return tuple(_changes("", *(_keyed(decided(plan.model_copy(update={"because": ()}))) for plan in (one, other))))


def _changes(where: str, one: Any, other: Any) -> Iterator[Change]:
    if _is_keyed(one) or _is_keyed(other):
        one, other = one or {}, other or {}
        before, after = ([name for name in rules if name in one and name in other] for rules in (one, other))
        if before != after:
            yield Change(f"{where} in order", before, after)
    if not (isinstance(one, dict) and isinstance(other, dict)):
        if one != other:
            yield Change(where, one, other)
        return
    for name in dict.fromkeys((*one, *other)):
        inner = name if name.startswith("[") or not where else f".{name}"
        yield from _changes(f"{where}{inner}", one.get(name), other.get(name))


def _is_keyed(value: Any) -> bool:
    return isinstance(value, dict) and any(name.startswith("[") for name in value)


def _keyed(value: Any) -> Any:
    """Return a value in which lists of named parts are dictionaries by `[name]`; of several the last, which wins."""
    if isinstance(value, dict):
        return {name: _keyed(found) for name, found in value.items()}
    if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
        key = next((key for key in _KEYS if all(key in part for part in value)), None)
        if key is not None:
            return {f"[{part[key]}]": {n: _keyed(v) for n, v in part.items() if n != key} for part in value}
    return value


def _said(value: Any) -> str:
    if value is None:
        return "default"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name.strip('[]')}: {_said(found)}" for name, found in value.items()) + "}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
