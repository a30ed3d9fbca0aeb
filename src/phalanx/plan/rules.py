"""Make a Plan from a strategy."""

from __future__ import annotations

from typing import Literal

from phalanx.plan.shape import ModelShape, ParamShape
from phalanx.plan.value import AllReduce, Axis, Frozen, ParamRule, Plan, Reason, Step
from phalanx.strategy import DistributedStrategy

DATA_AXIS = "data"


def plan_from_strategy(strategy: DistributedStrategy, shape: ModelShape, world_size: int) -> Plan:
    """Return the data-parallel Plan that a strategy asks for.

    Pure: the same arguments give the same Plan on every rank.

    Args:
        strategy: Validated settings.
        shape: The model's parameters.
        world_size: Number of ranks.
    """
    mean_or_sum: Literal["mean", "sum"] = "mean" if strategy.gradient_scale == "avg" else "sum"
    update = AllReduce(bucket_bytes=_bucket_bytes(strategy), reduce=mean_or_sum)
    return Plan(
        model_digest=shape.digest(),
        mesh=(Axis(name=DATA_AXIS, size=world_size),),
        params=(ParamRule(match="*", update=update), *_exceptions(shape, update)),
        step=Step(
            batch_axes=(DATA_AXIS,),
            compiled=strategy.graph,
            broadcast=strategy.parameter_broadcast,
            sync_buffers=strategy.sync_buffers,
        ),
        because=_reasons(strategy, shape, world_size),
    )


def _bucket_bytes(strategy: DistributedStrategy) -> int:
    # Unfused means one all-reduce per gradient: every parameter closes its own bucket.
    return int(strategy.fuse_grad_size_in_MB * 2**20) if strategy.fuse_all_reduce_ops else 1


def _exceptions(shape: ModelShape, update: AllReduce) -> tuple[ParamRule, ...]:
    def exception(param: ParamShape) -> ParamRule | None:
        if not param.trainable:
            return ParamRule(match=param.name, update=Frozen())
        if param.is_distributed:
            return ParamRule(match=param.name, update=update, managed="module")
        return None

    return tuple(rule for param in shape.params if (rule := exception(param)))


def _reasons(strategy: DistributedStrategy, shape: ModelShape, world_size: int) -> tuple[Reason, ...]:
    reasons = [
        Reason(
            setting=f"world size {world_size}",
            effect=f"each rank computes 1/{world_size} of every global batch",
        )
    ]
    if strategy.gradient_scale == "sum":
        reasons.append(Reason(setting="gradient_scale_configs", effect="gradients are summed, not averaged"))
    if not strategy.parameter_broadcast:
        reasons.append(Reason(setting="parameter_broadcast=False", effect="each rank keeps its own initial parameters"))
    if not strategy.fuse_all_reduce_ops:
        reasons.append(Reason(setting="fuse_all_reduce_ops=False", effect="one all-reduce per gradient"))
    if strategy.graph:
        reasons.append(Reason(setting="graph=True", effect="the forward pass and the loss are compiled"))
    frozen = sum(not p.trainable for p in shape.params)
    if frozen:
        reasons.append(Reason(setting=f"{frozen} parameters without requires_grad", effect="stay as they are"))
    return tuple(reasons)
