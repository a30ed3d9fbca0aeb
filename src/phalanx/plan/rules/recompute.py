"""`recomputed_modules`: the modules that a Plan recomputes in the backward pass (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from phalanx.plan.value import ModuleRule, matches


def recomputed_modules(rules: Sequence[ModuleRule], modules: Iterable[tuple[str, bool]]) -> dict[str, ModuleRule]:
    """Return the modules that are recomputed, by path, and the rule of each.

    The outermost module that is to be recomputed decides for all in it. A list of modules, which has no forward pass of
    its own, stands for its members. The model itself is never recomputed as a whole: that would save nothing.

    Args:
        rules: Of a Plan; the last match wins.
        modules: Path of every module, those around it before it, and whether it is a list of modules.
    """
    chosen: dict[str, ModuleRule] = {}
    list_rules: dict[str, ModuleRule] = {}
    decided: set[str] = set()
    for path, is_list in modules:
        parent = path.rpartition(".")[0]
        if parent in decided:
            decided.add(path)
            continue
        matching = [rule for rule in rules if path and matches(rule.match, path)]
        if parent in list_rules:
            matching.insert(0, list_rules[parent])
        if matching and matching[-1].recompute != "none":
            if is_list:
                list_rules[path] = matching[-1]
            else:
                chosen[path] = matching[-1]
                decided.add(path)
        elif any(rule.recompute != "none" for rule in matching):  # the last one is an exception for all in it
            decided.add(path)
    return chosen
