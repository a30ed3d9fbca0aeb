"""What ZeRO is where ranks may leave and join: `why_inelastic`, `with_whole_gradients`, `describe` (pure)."""

from __future__ import annotations

from phalanx.plan.shape import ModelShape
from phalanx.plan.value import AllReduce, Plan, ReduceScatter
from phalanx.units import format_bytes


def shards_of_plan(plan: Plan) -> ReduceScatter | None:
    """Return how a Plan shards; None if it shards nothing."""
    return next((rule.update for rule in plan.params if isinstance(rule.update, ReduceScatter)), None)


def why_inelastic(plan: Plan) -> str | None:
    """Return what of a Plan's sharding cannot continue without a rank; None if all can."""
    update = shards_of_plan(plan)
    if update is None:
        return None
    copies = [axis.name for axis in plan.mesh if axis.size > 1 and axis.name in plan.step.batch_axes]
    if update.along is not None and set(copies) - set(update.along):
        return "sharding_degree below the number of ranks where ranks may leave and join (-n a:b): leave it out"
    if update.offload == "cpu":
        return "optimize_offload of sharding where ranks may leave and join (-n a:b)"
    if plan.step.scaler is not None:
        return "sharding in float16 where ranks may leave and join (-n a:b): use bfloat16"
    return None


def describe(update: ReduceScatter, shape: ModelShape) -> str:
    """Return what becomes of a lost rank's shard, and of the stage, in a sentence for the log."""
    parameters = sum(param.bytes for param in shape.params)
    gradients = sum(param.bytes for param in shape.trainable)
    stage = {
        1: "",
        2: (
            " Stage 2 acts as stage 1: gradients stay whole until the update, so that others can finish a lost rank's "
            f"step ({format_bytes(gradients)} on each rank)."
        ),
        3: (
            " Stage 3 acts as stage 1: parameters and gradients stay whole, so that others can finish a lost rank's "
            f"step ({format_bytes(parameters)} and {format_bytes(gradients)} on each rank). If this is too much, give "
            "one number of ranks (-n 4)."
        ),
    }[update.zero]
    if update.mirror:
        return f"optimizer state is sharded; each rank keeps that of the next one too (mirror=1).{stage}"
    return (
        "optimizer state is sharded; without mirror=1 a lost rank's ZeRO shard comes from the newest checkpoint, from "
        f"which the job starts again (--max-restarts).{stage}"
    )


def with_whole_gradients(plan: Plan) -> Plan:
    """Return a Plan in which every rank has all parameters and gradients of what is sharded."""
    rules = tuple(
        rule.model_copy(update={"update": AllReduce(axes=rule.update.axes, reduce=rule.update.reduce)})
        if isinstance(rule.update, ReduceScatter)
        else rule
        for rule in plan.params
    )
    return plan.model_copy(update={"params": rules})
