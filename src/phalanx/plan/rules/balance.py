"""`check_balance`: whether what a Plan asks to balance over ranks of unequal speed can be (pure)."""

from __future__ import annotations

from phalanx.errors import PlanError
from phalanx.plan.mesh import is_sum_of_ranks
from phalanx.plan.value import AllReduce, Frozen, Plan, ReduceScatter


def check_balance(plan: Plan) -> None:
    """Raise unless what a Plan asks to balance can be.

    Raises:
        PlanError: Says what stands against it.
    """
    if plan.step.balance == "replicas" and plan.step.replicas is None:
        raise PlanError(
            'balance="replicas" moves logical replicas to faster ranks, and none were asked for. Ask for more than '
            'there are ranks, replicas=8, or give faster ranks more samples: balance="samples".'
        )
    if plan.step.balance == "samples" and (why := _unbalanced(plan)) is not None:
        raise PlanError(f'balance="samples" cannot be combined with {why}.')


def _unbalanced(plan: Plan) -> str | None:
    """Return what of a Plan would compute something else where ranks read different numbers of samples."""
    if plan.step.replicas is not None:
        return (
            f"{plan.step.replicas} logical replicas, which are equal parts of a global batch whatever the ranks. Use "
            'balance="replicas"'
        )
    other = next((axis.name for axis in plan.mesh if axis.size > 1 and axis.name not in plan.step.batch_axes), None)
    if other is not None:
        return f"the mesh axis {other!r}: ranks that compute a model together are not balanced yet"
    if plan.tables or plan.servers:
        return "parameter servers, whose workers do not wait for each other's batches"
    if is_sum_of_ranks(plan):
        return 'gradient_scale_configs "sum", whose result depends on how samples are split'
    for rule in plan.params:
        if not isinstance(rule.update, AllReduce | ReduceScatter | Frozen):
            return f"the update {rule.update.kind!r}, by which ranks train apart"
    return None
