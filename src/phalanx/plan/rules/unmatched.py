"""`check_rules`: reject rules of a Plan that match no parameter or module of the model (pure)."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

from phalanx.errors import PlanError
from phalanx.i18n import Labels, tr
from phalanx.plan.value import Plan, matches

_UNMATCHED: Labels = {
    "modules": (
        "the Plan has a rule modules[{rule}], which matches no module of this model. Nearest in spelling: {nearest}. "
        "Correct the rule, or leave it out."
    ),
    "params": (
        "the Plan has a rule params[{rule}], which matches no parameter of this model. Nearest in spelling: "
        "{nearest}. Correct the rule, or leave it out."
    ),
}
"""What is said of a rule that matches nothing, by its kind."""


_MOST_NAMES = 5


def check_rules(plan: Plan, *, params: Mapping[str, str], modules: Collection[str]) -> None:
    """Raise if a rule of a Plan is about nothing of a model. `*` may be: it is about whatever there is.

    Args:
        plan: The Plan.
        params: The first name of each of the model's parameters, before it is cut, by its plain names; a shared one has
            several, and rules are looked up by the first.
        modules: Names of its modules; the model itself is "".

    Raises:
        PlanError: For the first such rule; says which names are nearest in spelling, or the first of a parameter.
    """
    for rule in plan.params:
        first = {params[name] for name in _covered("params", rule.match, params)}
        if first and not any(matches(rule.match, name) for name in first):
            raise PlanError(
                tr(
                    "the Plan has a rule params[{rule}], which does nothing: what it matches is shared, and a shared "
                    "parameter goes by its first name, {first}. Say that, or leave the rule out.",
                    rule=rule.match,
                    first=", ".join(sorted(first)),
                )
            )
    for module in plan.modules:
        _covered("modules", module.match, modules)


def _covered(key: str, pattern: str, names: Collection[str]) -> list[str]:
    """Return the names that a pattern matches; raises PlanError if there is none and it is not `*`."""
    covered = [name for name in names if matches(pattern, name)]
    if not covered and pattern != "*":
        raise PlanError(tr(_UNMATCHED[key], rule=pattern, nearest=_nearest(pattern, names)))
    return covered


def _nearest(pattern: str, names: Collection[str]) -> str:
    named = [name for name in names if name]
    return ", ".join(difflib.get_close_matches(pattern, named, n=_MOST_NAMES, cutoff=0.0)) or "-"
