"""`plan_from_strategy`: build a Plan from a `DistributedStrategy`."""

from __future__ import annotations

from phalanx.errors import PlanError
from phalanx.plan.mesh import Position
from phalanx.plan.rules.mesh import batch_axes, mesh_from_strategy
from phalanx.plan.rules.servers import (
    DENSE,
    DENSE_WIDTH,
    check_servers,
    dense_on_servers,
    push_from_strategy,
    server_reasons,
    sparse_tables,
)
from phalanx.plan.rules.techniques import (
    modules_from_strategy,
    scaler_from_strategy,
    schedule_from_strategy,
    update_from_strategy,
)
from phalanx.plan.shape import ModelShape, ParamShape
from phalanx.plan.value import Axis, Frozen, ParamRule, Plan, Push, Reason, Server, Step, Table, Update
from phalanx.strategy import DistributedStrategy
from phalanx.strategy.configs import GradientMergeConfigs
from phalanx.strategy.techniques import TECHNIQUES, first_conflict


def plan_from_strategy(strategy: DistributedStrategy, shape: ModelShape, world_size: int, servers: int = 0) -> Plan:
    """Return the Plan that a strategy asks for: its mesh, what lives where, how it is computed and updated.

    Pure: the same arguments give the same Plan on every rank.

    Args:
        strategy: Validated settings.
        shape: The model's parameters.
        world_size: Number of workers.
        servers: Number of parameter servers.

    Raises:
        PlanError: If several workers share tables and there is no server, or a technique lacks a setting.
    """
    _check_complete(strategy)
    conflict = first_conflict(strategy.techniques | ({"a_sync"} if servers else set()))
    if conflict is not None:
        first, second, pair = conflict
        raise PlanError(
            f"strategy.{next(iter({first, second} - {'a_sync'}))} cannot be on in a job with {servers} parameter "
            f"servers: {pair.why}. Launch without servers, or turn it off."
        )
    check_servers(strategy, shape, world_size, servers)
    mesh = mesh_from_strategy(strategy, world_size)
    update, push = update_from_strategy(strategy, mesh), push_from_strategy(strategy, servers)
    dense, tables = ParamRule(match="*", update=update), sparse_tables(shape)
    if dense_on_servers(strategy, servers):
        dense = ParamRule(match="*", place=Server(table=DENSE), update=push)
        tables = (*tables, Table(name=DENSE, module="*", dim=DENSE_WIDTH))
    merge = strategy.config(GradientMergeConfigs) if strategy.gradient_merge else GradientMergeConfigs()
    return Plan(
        model_digest=shape.digest(),
        mesh=mesh,
        servers=servers,
        params=(dense, *_exceptions(shape, update, push)),
        modules=modules_from_strategy(strategy, shape, mesh),
        tables=tables,
        schedule=schedule_from_strategy(strategy, mesh),
        step=Step(
            batch_axes=batch_axes(mesh),
            accumulate=merge.k_steps,
            accumulate_mean=merge.avg,
            compiled=strategy.graph,
            scaler=scaler_from_strategy(strategy),
            sync_bn=strategy.sync_batch_norm,
            broadcast=strategy.parameter_broadcast,
            sync_buffers=strategy.sync_buffers,
            replicas=strategy.logical_replicas or None,
            replica_threads=strategy.replica_threads,
            balance=strategy.balance,
        ),
        because=(*_reasons(strategy, shape, mesh), *server_reasons(strategy, shape, servers)),
    )


def _check_complete(strategy: DistributedStrategy) -> None:
    """Raise if a technique is on that needs a setting nobody gave."""
    if strategy.clip and not strategy.clip_configs:
        raise PlanError(
            'strategy.clip needs to know to what. Set clip_configs = {"norm": 1.0}, {"value": 0.1}, or both.'
        )


def _exceptions(shape: ModelShape, update: Update, push: Push) -> tuple[ParamRule, ...]:
    def exception(param: ParamShape) -> ParamRule | None:
        if param.table:
            return ParamRule(match=param.name, place=Server(table=param.table.name), update=push)
        if not param.trainable:
            return ParamRule(match=param.name, update=Frozen())
        if param.is_distributed:
            return ParamRule(match=param.name, update=update, managed="module")
        return None

    return tuple(rule for param in shape.params if (rule := exception(param)))


def _reasons(strategy: DistributedStrategy, shape: ModelShape, mesh: tuple[Axis, ...]) -> tuple[Reason, ...]:
    position = Position(mesh, rank=0)
    ranks, shares = position.count([axis.name for axis in mesh]), position.count(batch_axes(mesh))
    effect = f"each rank computes 1/{shares} of every global batch"
    reasons = [Reason(setting=f"world size {ranks}", effect=effect)]
    if strategy.gradient_scale == "sum":
        reasons.append(Reason(setting="gradient_scale_configs", effect="gradients are summed, not averaged"))
    if strategy.logical_replicas:
        shares = strategy.logical_replicas
        effect = f"each of {shares} replicas computes 1/{shares} of every global batch, on whichever rank holds it"
        reasons[0] = Reason(setting=f"logical_replicas={shares}", effect=effect)
    if not strategy.parameter_broadcast:
        reasons.append(Reason(setting="parameter_broadcast=False", effect="each rank keeps its own initial parameters"))
    if not strategy.fuse_all_reduce_ops:
        reasons.append(Reason(setting="fuse_all_reduce_ops=False", effect="one all-reduce per gradient"))
    alone = " (one rank: nothing to do)" if ranks == 1 else ""
    for name, technique in TECHNIQUES.items():
        if name in strategy.techniques and technique.effect:
            effect = technique.effect + (alone if technique.across_ranks else "")
            reasons.append(Reason(setting=f"{name}=True", effect=effect))
    frozen = sum(not p.trainable for p in shape.params)
    if frozen:
        reasons.append(Reason(setting=f"{frozen} parameters without requires_grad", effect="stay as they are"))
    return tuple(reasons)
