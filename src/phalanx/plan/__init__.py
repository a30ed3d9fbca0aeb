"""The Plan: a frozen value that says where parameters live and how they are computed and updated (pure).

In: a strategy, the shape of a model, a number of ranks. Out: a `Plan`, to be read, saved, compared, explained and
applied. Start with `value`, then `rules`.
"""

from __future__ import annotations

from phalanx.plan.files import load_plan, save_plan
from phalanx.plan.report.diff import Change, diff
from phalanx.plan.report.explain import Explanation, explain
from phalanx.plan.rules.rules import plan_from_strategy
from phalanx.plan.shape import ModelShape, ParamShape
from phalanx.plan.value import Plan

__all__ = [
    "Change",
    "Explanation",
    "ModelShape",
    "ParamShape",
    "Plan",
    "diff",
    "explain",
    "load_plan",
    "plan_from_strategy",
    "save_plan",
]
