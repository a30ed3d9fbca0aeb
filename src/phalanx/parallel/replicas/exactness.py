"""`why_inexact`: what of a Plan has other bits on other numbers of ranks, so that logical replicas refuse it."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from phalanx.errors import PlanError
from phalanx.parallel.zero.elastic_plan import why_inelastic
from phalanx.plan.rules.mesh import CONTEXT_AXIS, MODEL_AXIS, STAGE_AXIS
from phalanx.plan.styles import STYLES
from phalanx.plan.value import AllReduce, Frozen, Plan, ReduceScatter


def why_inexact(plan: Plan, *, is_shared: bool, is_elastic: bool = False) -> str | None:
    """Return what of a Plan has other bits on other numbers of ranks; None if nothing does.

    Args:
        plan: The Plan.
        is_shared: Whether some rank holds several replicas.
        is_elastic: Whether ranks may leave and join, so that each has whole gradients of every global batch.
    """
    groups = {*plan.step.batch_axes, MODEL_AXIS, STAGE_AXIS, CONTEXT_AXIS}
    other = next((axis.name for axis in plan.mesh if axis.size > 1 and axis.name not in groups), None)
    if other is not None:
        return f"the mesh axis {other!r}, along which nothing is known of the order of sums"
    if any(rule.style is not None and STYLES[rule.style].shards_experts for rule in plan.modules):
        return "experts dealt to ranks, which add up the gradients of tokens in an order that depends on the ranks"
    if not plan.step.broadcast:
        return "parameter_broadcast=False, by which each rank begins with parameters of its own"
    if not plan.step.sync_buffers and is_shared:
        return "sync_buffers=False on fewer ranks than replicas"
    for rule in plan.params:
        if not isinstance(rule.update, AllReduce | ReduceScatter | Frozen):
            return f"the update {rule.update.kind!r}, which depends on the number of ranks"
        if isinstance(rule.update, AllReduce) and (rule.update.wire_dtype or rule.update.route == "hierarchical"):
            return "fp16_allreduce or use_hierarchical_allreduce, which round by rank or by host"
        if isinstance(rule.update, ReduceScatter) and rule.update.wire_dtype:
            return "a dtype of its own for the gradients of sharding"
    if plan.step.sync_bn and is_shared:
        return (
            "sync_batch_norm on fewer ranks than replicas: a layer waits for the samples of all replicas, and those of "
            "one rank run one after the other. Start as many ranks as there are replicas, or turn it off"
        )
    return _inexact_together(plan, accumulates=plan.step.accumulate > 1 and is_shared and not is_elastic)


def _inexact_together(plan: Plan, *, accumulates: bool) -> str | None:
    """Return which two techniques of a Plan have other bits on other numbers of ranks; None if none have.

    Args:
        plan: The Plan.
        accumulates: Whether gradients wait for further global batches on the rank that computed them.
    """
    is_sharded = any(isinstance(rule.update, ReduceScatter) for rule in plan.params)
    has_stages = any(axis.size > 1 and axis.name == STAGE_AXIS for axis in plan.mesh)
    if is_sharded and any(axis.size > 1 and axis.name == CONTEXT_AXIS for axis in plan.mesh):
        return "sharding and context parallel together, which add up gradients at once"
    if has_stages and is_sharded:
        return "sharding of a pipeline's stages, which adds up their gradients by rank"
    if has_stages and accumulates:
        return "gradient_merge of a pipeline on fewer ranks than replicas. Ask for more micro-batches instead"
    if is_sharded and accumulates:
        return "gradient_merge and sharding together on fewer ranks than replicas"
    return None


def why_lost(plan: Plan) -> str | None:
    """Return what of a Plan is lost with a rank; None if nothing is."""
    if (why := why_inelastic(plan)) is not None:
        return why
    if any(axis.size > 1 and axis.name not in plan.step.batch_axes for axis in plan.mesh):
        return "model parallel where ranks may leave and join (-n a:b): what a lost rank holds has no other copy"
    if plan.step.balance is not None:
        return "balance where ranks may leave and join (-n a:b), which share replicas out evenly"
    return None


def check_statistics(model: nn.Module, plan: Plan) -> None:
    """Raise unless what layers count in a forward pass can be the same on other numbers of ranks.

    Raises:
        PlanError: If a pipeline has a layer whose statistics depend on how many micro-batches there were.
    """
    has_stages = any(axis.size > 1 and axis.name == STAGE_AXIS for axis in plan.mesh)
    for name, module in model.named_modules() if has_stages and plan.step.replicas else ():
        if isinstance(module, _BatchNorm) and module.track_running_stats and module.momentum is None:
            raise PlanError(
                f"{name!r} averages its statistics over all micro-batches (momentum=None), and logical replicas with "
                "other numbers of rows are cut into other numbers of these. Give it a momentum, 0.1."
            )
