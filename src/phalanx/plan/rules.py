"""Make a Plan from a strategy."""

from __future__ import annotations

from typing import Literal

from phalanx.errors import PlanError
from phalanx.plan.shape import ModelShape, ParamShape
from phalanx.plan.value import AllReduce, Axis, Frozen, ParamRule, Plan, Push, Reason, Server, Step, Table
from phalanx.strategy import DistributedStrategy

DATA_AXIS = "data"

ACTING = frozenset({"graph", "a_sync"})
"""Techniques that this version carries out."""

DENSE = "dense"
"""Stands in a Plan for the tables of dense parameters; there is one for each group of an optimizer."""

DENSE_WIDTH = 1024
"""Values per row of such a table."""


def plan_from_strategy(strategy: DistributedStrategy, shape: ModelShape, world_size: int, servers: int = 0) -> Plan:
    """Return the Plan that a strategy asks for: data parallel, and what lives in tables.

    Pure: the same arguments give the same Plan on every rank.

    Args:
        strategy: Validated settings.
        shape: The model's parameters.
        world_size: Number of workers.
        servers: Number of parameter servers.

    Raises:
        PlanError: If several workers share tables and there is no server, or a technique is not there yet.
    """
    waiting = sorted(strategy.techniques - ACTING)
    if waiting:
        raise PlanError(
            f"strategy.{waiting[0]} is not available in this version; turn it off. Nothing would act on it."
        )
    sparse = tuple(param.table for param in shape.params if param.table)
    if sparse and world_size > 1 and not servers:
        raise PlanError(
            f"{world_size} workers share table {sparse[0].name!r}, but the job has no parameter server to hold it. "
            f"Launch with `phalanx run --server_num 1 --worker_num {world_size} train.py`."
        )
    update = AllReduce(bucket_bytes=_bucket_bytes(strategy), reduce=_reduce(strategy))
    dense = ParamRule(match="*", update=update)
    tables = sparse
    if dense_on_servers(strategy, servers):
        dense = ParamRule(match="*", place=Server(table=DENSE), update=push_from_strategy(strategy, servers))
        tables = (*sparse, Table(name=DENSE, module="*", dim=DENSE_WIDTH))
    return Plan(
        model_digest=shape.digest(),
        mesh=(Axis(name=DATA_AXIS, size=world_size),),
        servers=servers,
        params=(dense, *_exceptions(shape, update, push_from_strategy(strategy, servers))),
        tables=tuple(dict.fromkeys(tables)),
        step=Step(
            batch_axes=(DATA_AXIS,),
            compiled=strategy.graph,
            broadcast=strategy.parameter_broadcast,
            sync_buffers=strategy.sync_buffers,
        ),
        because=(*_reasons(strategy, shape, world_size), *_server_reasons(strategy, shape, servers)),
    )


def push_from_strategy(strategy: DistributedStrategy, servers: int) -> Push:
    """Return how gradients reach tables: as the strategy says, else asynchronously. Without servers modes agree."""
    configs, reduce = strategy.a_sync_configs, _reduce(strategy)
    if configs.get("k_steps", 0) > 0:
        return Push(
            mode="geo",
            steps=configs["k_steps"],
            local_optimizer=configs.get("local_optimizer", False),
            reduce=reduce,
        )
    if configs.get("half_async", False):
        return Push(mode="half_async", steps=configs.get("max_merge_var_num", 1), reduce=reduce)
    if "staleness" in configs:
        return Push(mode="bounded", steps=configs["staleness"], reduce=reduce)
    asynchronous = servers > 0 if strategy.a_sync is None else strategy.a_sync
    return Push(mode="async" if asynchronous else "sync", reduce=reduce)


def dense_on_servers(strategy: DistributedStrategy, servers: int) -> bool:
    """Return whether dense parameters live on the servers, as the rows do."""
    return servers > 0 and strategy.a_sync_configs.get("dense", "server") == "server"


def _reduce(strategy: DistributedStrategy) -> Literal["mean", "sum"]:
    return "mean" if strategy.gradient_scale == "avg" else "sum"


def _bucket_bytes(strategy: DistributedStrategy) -> int:
    # Unfused means one all-reduce per gradient: every parameter closes its own bucket.
    return int(strategy.fuse_grad_size_in_MB * 2**20) if strategy.fuse_all_reduce_ops else 1


def _exceptions(shape: ModelShape, update: AllReduce, push: Push) -> tuple[ParamRule, ...]:
    def exception(param: ParamShape) -> ParamRule | None:
        if param.table:
            return ParamRule(match=param.name, place=Server(table=param.table.name), update=push)
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


def _server_reasons(strategy: DistributedStrategy, shape: ModelShape, servers: int) -> tuple[Reason, ...]:
    sparse = any(param.table for param in shape.params)
    if not servers:
        said = "its table is in this process: the job has one worker and no server"
        return (Reason(setting="SparseEmbedding", effect=said),) if sparse else ()
    push = push_from_strategy(strategy, servers)
    steps = f" ({push.steps} steps)" if push.steps else ""
    asked = "no a_sync" if strategy.a_sync is None and push.mode == "async" else "a_sync"
    reasons = [Reason(setting=asked, effect=f"workers push to the servers in mode {push.mode}{steps}")]
    if dense_on_servers(strategy, servers):
        effect = "dense parameters live on the servers; buffers are each worker's own"
    else:
        effect = "dense parameters live on every worker, equal by all-reduce"
    return (*reasons, Reason(setting=f"{servers} server{'s' * (servers > 1)}", effect=effect))
