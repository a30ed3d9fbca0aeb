"""One function per technique of a Plan (tables, ZeRO, precision, stages, ...), called by `apply` when used."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from phalanx.comm.agreement import share
from phalanx.comm.context import Context
from phalanx.errors import PlanError
from phalanx.parallel.data.grad_reduction import reduction_for
from phalanx.parallel.data.reducer import Reducer
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.model_shape import is_handle, owner_of, shape_of
from phalanx.parallel.session import Applied, model_record, session
from phalanx.parallel.tensor.layers.gathered_linear import average
from phalanx.plan.buckets import all_reduce_buckets
from phalanx.plan.mesh import is_sum_of_ranks, reduced_along
from phalanx.plan.rules.mesh import STAGE_AXIS
from phalanx.plan.rules.servers import DENSE
from phalanx.plan.shape import ModelShape
from phalanx.plan.value import AllReduce, Average, Plan, Push, ReduceScatter, Server, TopK

if TYPE_CHECKING:  # only jobs that need it wait for it
    from phalanx.parallel.pipeline.engine import PipelineEngine
    from phalanx.parallel.update.updaters import Updater

logger = logging.getLogger("phalanx.parallel")


def attach_tables(plan: Plan, model: nn.Module) -> None:
    """Name the tables of a model, and say which of its dense parameters live on servers."""
    from phalanx.ps.client import table_client  # a job without tables does not wait for this

    rules = {name: plan.rule_for(name) for name, _ in model.named_parameters()}
    push = next(rule.update for rule in rules.values() if isinstance(rule.update, Push))
    dense = any(isinstance(rule.place, Server) and rule.place.table == DENSE for rule in plan.params)
    client = table_client.current()
    session.is_in_table = table_client.holds
    client.configure(push, dense=dense)
    for name, param in model.named_parameters():
        location = rules[name].place
        if is_handle(param):
            assert isinstance(location, Server)
            client.registry.name(param, location.table)
        elif isinstance(location, Server) and location.table != DENSE:
            from phalanx.ps.placed_embedding import place_embedding  # imports torch's compiler

            embedding = owner_of(name, model)
            assert isinstance(embedding, nn.Embedding)
            place_embedding(embedding, location.table, client)
        else:
            client.registry.place(param, on_servers=isinstance(location, Server))
    if client.context.role.server_endpoints and any(is_handle(param) for param in model.parameters()):
        from phalanx.ps.model_passes import ModelPasses

        ModelPasses(model)


def reduce_gradients(
    plan: Plan, model: nn.Module, mesh: Mesh, update: ReduceScatter | None, context: Context
) -> Reducer | None:
    """Let gradients be added up over ranks, and parameters be sharded if `update` says how. Collective.

    Returns:
        What averages in buckets; None when nothing does.
    """
    if update is not None:
        return _shard(plan, model, mesh, update, context)
    if all_reduce_buckets(plan, shape_of(model)):
        return _data_parallel(plan, model, mesh, context)
    _average_module_held(plan, model, mesh)
    return None


def _data_parallel(plan: Plan, model: nn.Module, mesh: Mesh, context: Context) -> Reducer:
    if not dist.is_initialized() and context.is_distributed:
        if context.role.least_workers:
            raise PlanError(
                "this Plan averages gradients by all-reduce, which needs all workers, and in this job they come and go "
                f"(--worker-num {context.role.least_workers}:{context.world_size}). Keep dense parameters on the "
                'servers, a_sync_configs = {"dense": "server"}, or give --worker-num one number.'
            )
        raise PlanError(
            f"worker {context.rank} was started again alone, and this Plan averages gradients by all-reduce, which "
            "needs all workers. Keep dense parameters on the servers, a_sync_configs = "
            '{"dense": "server"}, where workers are to be started again.'
        )
    _average_module_held(plan, model, mesh)
    buckets = all_reduce_buckets(plan, shape_of(model))
    gradients = sum(len(bucket.params) for bucket in buckets)
    logger.info("Find all_reduce operators: %d. After fusion: %d -> %d.", gradients, gradients, len(buckets))
    return Reducer(model, buckets, mesh, context, sync_buffers=plan.step.sync_buffers)


def reduce_over_replicas(
    plan: Plan, model: nn.Module, mesh: Mesh, update: ReduceScatter | None, applied: Applied, context: Context
) -> Reducer | None:
    """Let the gradients of a model that is distributed be added up over logical replicas from now on. Collective.

    Args:
        plan: Its Plan, with the replicas.
        model: The model.
        mesh: That of the Plan.
        update: How its parameters are sharded.
        applied: What was made of the model before.
        context: Of this process, which has the replicas.

    Returns:
        What takes the place of its reducer.
    """
    if applied.reducer is not None:
        applied.reducer.close()
    if applied.pipeline is not None:
        applied.pipeline.reducer = _stage_reducer(plan, model, mesh, context)
        return applied.pipeline.reducer
    if update is not None:
        return _reduce_shards(plan, model, mesh, update, context)
    buckets = all_reduce_buckets(plan, shape_of(model))
    return Reducer(model, buckets, mesh, context, sync_buffers=plan.step.sync_buffers) if buckets else None


def _average_module_held(plan: Plan, model: nn.Module, mesh: Mesh) -> None:
    """Divide the gradients to which no other rank adds: their layers' collectives bring those of all rows here."""
    shares: dict[nn.Parameter, int] = {}
    for name, param in model.named_parameters():
        rule = plan.rule_for(name)
        if param.requires_grad and isinstance(rule.update, AllReduce) and not reduced_along(plan, rule):
            shares[param] = mesh.size(plan.step.batch_axes) if rule.update.reduce == "mean" else 1
    average(model, shares)


def check_operators(plan: Plan, model: nn.Module) -> None:
    """Raise unless a Plan's rules for operators are of the step that this model runs. Collective if there are any.

    The step is the one that rank 0 captured of this model (`phalanx.auto.capture.step.capture`, `px.auto_parallel`, or
    who has its data: `px.distribute` and `px.Model`).

    Raises:
        PlanError: On all ranks; says what does not fit.
    """
    if not plan.ops:
        return
    check, why = model_record(model).captured_step, None
    if check is not None:
        why = check(plan)
    elif dist.get_rank() == 0 if dist.is_initialized() else True:
        why = (
            f"they are of the step captured as {plan.capture_digest}, and no step of this model was captured. Give the "
            "data beside the Plan, px.distribute(model, optimizer, data, plan=plan), or call "
            "phalanx.auto.capture.step.capture(model, sample) with a global batch before, on rank 0 at least"
        )
    why = share("operators", why)
    if why is not None:
        raise PlanError(f"this Plan places single operators: {why}, or remove `ops`.")


def place_operators(plan: Plan, model: nn.Module, mesh: Mesh) -> None:
    """Let single operators compute as a Plan says, if it says so of any. Collective then."""
    if plan.ops:
        from phalanx.parallel.operators import placement  # imports DTensor

        placement.place_operators(plan, model, mesh)


def prepare_modules(plan: Plan, model: nn.Module, context: Context) -> None:
    """Change how modules compute, in place; what is not asked for is not imported."""
    if plan.step.sync_bn and context.readers.count > 1:
        from phalanx.parallel.data.sync_batch_norm import keep_out_of_graph, synchronise

        # A pipeline weighs the loss.
        if not synchronise(model, is_weighed=_has_stages(plan), is_sum=is_sum_of_ranks(plan)):
            logger.warning("sync_batch_norm has no effect: the model has no batch normalisation.")
        if plan.step.compiled:
            keep_out_of_graph()
    if any(rule.recompute != "none" or rule.offload for rule in plan.modules):
        from phalanx.parallel.memory.activation_checkpointing import apply_recompute

        apply_recompute(plan.modules, model)
    whole = next((rule for rule in plan.modules if rule.match == "" and rule.dtype is not None), None)
    if whole is not None and whole.dtype is not None:
        from phalanx.parallel.precision.autocast import apply_precision

        keep = [rule.match for rule in plan.modules if rule.match and rule.dtype == "float32"]
        apply_precision(model, whole.dtype, pure=whole.pure, keep=keep)
    if plan.step.compiled and not _has_stages(plan):  # else each stage is compiled
        # In place, so that the module and its state_dict keys stay as they were.
        model.compile(dynamic=plan.step.dynamic_shapes)


def _has_stages(plan: Plan) -> bool:
    return any(axis.name == STAGE_AXIS and axis.size > 1 for axis in plan.mesh)


def updaters_of(
    plan: Plan, model: nn.Module, mesh: Mesh, context: Context, reducer: Reducer | None
) -> tuple[Updater, ...]:
    """Return what acts around the steps of a model's optimizers. Collective."""
    if not any(isinstance(rule.update, (Average, TopK)) for rule in plan.params):
        return ()
    from phalanx.parallel.update.updaters import build_updaters

    return build_updaters(plan, model, mesh, context, reducer)


def split_stages(
    plan: Plan, model: nn.Module, mesh: Mesh, update: ReduceScatter | None, context: Context
) -> PipelineEngine:
    """Keep this rank's stages of a model, and average their gradients over the ranks with the same. Collective."""
    from phalanx.parallel.pipeline import engine  # a job without stages does not wait for this

    pipeline = engine.build_pipeline(plan, model, mesh, context)
    buckets = all_reduce_buckets(plan, shape_of(model))
    for bucket in buckets:
        reduction_for(
            bucket.update, bucket.axes, mesh, context
        )  # groups are made by all ranks, whatever their stages hold
    _average_module_held(plan, model, mesh)
    if update is not None and mesh.size(mesh.batch_axes) > 1:
        from phalanx.parallel.zero.sharded import ShardedStages  # a job that shards nothing does not wait for this

        pipeline.sharded = ShardedStages(plan, model, mesh, update)
    if buckets or mesh.size(mesh.batch_axes) > 1:
        pipeline.reducer = _stage_reducer(plan, model, mesh, context)
    return pipeline


def _stage_reducer(plan: Plan, model: nn.Module, mesh: Mesh, context: Context) -> Reducer:
    names = {name for name, param in model.named_parameters() if not param.is_meta}
    mine = ModelShape(tuple(param for param in shape_of(model).params if param.name in names))
    buckets, buffers = all_reduce_buckets(plan, mine), plan.step.sync_buffers
    return Reducer(model, buckets, mesh, context, sync_buffers=buffers, overlapped=False)


def _shard(plan: Plan, model: nn.Module, mesh: Mesh, update: ReduceScatter, context: Context) -> Reducer:
    from phalanx.parallel.zero import sharded  # a job that shards nothing does not wait for this

    if update.mirror:
        logger.warning("mirror=1 of sharding has no effect: no rank of this job may leave (phalanx run -n a:b).")
    sharded.shard(plan, model, mesh, update)
    sharded.watch_forward_passes(model)
    return _reduce_shards(plan, model, mesh, update, context)


def _reduce_shards(plan: Plan, model: nn.Module, mesh: Mesh, update: ReduceScatter, context: Context) -> Reducer:
    """Let torch reduce the gradients of a sharded model over what reads rows, and buckets its buffers. Collective."""
    from phalanx.parallel.zero import sharded

    reducer = Reducer(model, (), mesh, context, sync_buffers=plan.step.sync_buffers)
    sharded.divide_sums(model, mesh, update)
    reducer.adopt(sharded.weigh_rows(model, reducer, context, is_sum=update.reduce == "sum"))
    if context.replicas is not None:
        from phalanx.parallel.zero.replica_reduce import add_up_replicas

        add_up_replicas(model, context.replicas, moves=plan.step.balance == "replicas")
    return reducer
