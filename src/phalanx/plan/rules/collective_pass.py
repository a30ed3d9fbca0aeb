"""`why_collective`, `why_not_alone`: whether one rank can compute a pass of a model again by itself (pure)."""

from __future__ import annotations

import math

from phalanx.plan.mesh import rows_brought_along
from phalanx.plan.rules.mesh import STAGE_AXIS
from phalanx.plan.value import Plan, ReduceScatter


def why_collective(plan: Plan) -> str | None:
    """Return why the ranks have to make a forward or backward pass of a model together; None if each makes its own."""
    other_axes = [axis.name for axis in plan.mesh if axis.size > 1 and axis.name not in plan.step.batch_axes]
    readers = math.prod(axis.size for axis in plan.mesh if axis.name in plan.step.batch_axes)
    is_gathered_anew = any(isinstance(rule.update, ReduceScatter) and _regathers(rule.update) for rule in plan.params)
    reasons = {
        "it is split into stages": STAGE_AXIS in other_axes,
        "its ranks exchange parts of activations": bool(other_axes) or bool(plan.ops),
        "its ranks exchange rows or tokens": any(rows_brought_along(plan, rule) for rule in plan.params),
        "its batch norms are synchronised": plan.step.sync_bn and readers > 1,
        "ZeRO 3 gathers parameters in every pass": is_gathered_anew,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def why_not_alone(plan: Plan, *, has_servers: bool) -> str | None:
    """Return why a rank cannot make a pass again alone, without changing a result; None if it can.

    Args:
        plan: The Plan of the model.
        has_servers: Whether the job has parameter servers.
    """
    if plan.tables or has_servers:
        return "it trains with parameter servers"
    return why_collective(plan)


def _regathers(update: ReduceScatter) -> bool:
    return update.zero == 3 and update.reshard
