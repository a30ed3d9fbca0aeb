"""Rules of a Plan that are about nothing in its model, such as those with a misspelt name (pure)."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from phalanx.cluster.messages import text
from phalanx.errors import PlanError
from phalanx.plan.value import Plan, matches

_MOST_NAMES = 5


def check_rules(plan: Plan, *, params: Collection[str], modules: Collection[str]) -> None:
    """Raise if a rule of a Plan matches nothing of a model. `*` may: it is about whatever there is.

    Args:
        plan: The Plan.
        params: Plain names of the model's parameters, before it is cut; those of shared ones too.
        modules: Names of its modules; the model itself is "".

    Raises:
        PlanError: For the first such rule; says which names are nearest in spelling.
    """
    about = (
        ("rule of no parameter", (rule.match for rule in plan.params), params),
        ("rule of no module", (rule.match for rule in plan.modules), modules),
    )
    for key, patterns, known in about:
        for pattern in patterns:
            if pattern != "*" and pattern not in known and not any(matches(pattern, name) for name in known):
                raise PlanError(text(key, rule=pattern, nearest=_nearest(pattern, known)))


def _nearest(pattern: str, known: Collection[str]) -> str:
    named = [name for name in known if name]
    return ", ".join(difflib.get_close_matches(pattern, named, n=_MOST_NAMES, cutoff=0.0)) or "-"
