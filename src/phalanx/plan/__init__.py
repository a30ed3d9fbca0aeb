"""The Plan: one frozen value that says where everything lives and how it is computed and updated. Pure."""

from __future__ import annotations

from phalanx.plan.explain import Explanation, explain
from phalanx.plan.files import load_plan, save_plan
from phalanx.plan.rules import plan_from_strategy
from phalanx.plan.shape import ModelShape, ParamShape
from phalanx.plan.value import Plan

__all__ = [
    "Explanation",
    "ModelShape",
    "ParamShape",
    "Plan",
    "explain",
    "load_plan",
    "plan_from_strategy",
    "save_plan",
]
