"""`resume_replicas`: continue with the shares of global batches that a checkpoint was trained with, on other ranks.

A run splits global batches over its ranks. Where one of its checkpoints is loaded on fewer ranks, each share becomes a
logical replica: the same samples, in the same shapes, with its rank's random numbers, added up in the order in which
the ranks added up. Until the number of ranks changes nothing is different, and nothing costs more.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from torch import nn

from phalanx.comm.batch.replicas import assign_replicas
from phalanx.comm.context import Context
from phalanx.data.loader.loader import ShardedLoader
from phalanx.errors import PlanError
from phalanx.parallel.checks.step_check import watch_every_optimizer
from phalanx.parallel.data.replicas.replica_record import ReplicaRecord
from phalanx.parallel.elastic.peer_state import schedulers_of
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.replicas.assign import split_over_replicas
from phalanx.parallel.replicas.exactness import check_statistics, why_inexact
from phalanx.parallel.replicas.gate import hold_updates
from phalanx.parallel.session import (
    StepPhase,
    accumulation_of,
    applied_to,
    distributed_models,
    distributed_optimizers,
    model_record,
    optimizer_record,
)
from phalanx.parallel.step.gate import follow_updates
from phalanx.parallel.techniques import reduce_over_replicas
from phalanx.parallel.validate import sharded_update
from phalanx.plan.value import Plan

logger = logging.getLogger("phalanx.parallel")


def resume_replicas(record: ReplicaRecord, context: Context, loader: ShardedLoader) -> bool:
    """Split training batches over what a checkpoint was trained with; return whether they are now. Collective.

    Nothing changes where the run has replicas of its own, or as many ranks as the checkpoint was trained with.

    Args:
        record: What the checkpoint holds.
        context: Of this process, between two steps.
        loader: Gives out the batches.
    """
    ranks = context.readers.count
    if context.replicas is not None or (record.count == ranks and not record.is_asked):
        return False
    why = "a stream is read once, in order" if loader.is_stream else _obstacle(record, context)
    if why is not None and record.is_asked:
        return False  # an error, which the loader raises
    if context.rank == 0:
        what = ("logical replica" if record.is_asked else "data-parallel rank") + "s" * (record.count != 1)
        logger.info("the checkpoint was trained with %d %s: %s", record.count, what, _outcome(record, ranks, why))
    if why is not None:
        return False
    for model in distributed_models():
        _split(model, record, context)
    for optimizer in distributed_optimizers():
        hold_updates(optimizer, context)
        if (accumulation := accumulation_of(optimizer)) is not None:
            accumulation.follow_reducer(optimizer)
        for scheduler in schedulers_of(optimizer):  # the loop runs more often than the optimizer updates
            follow_updates(scheduler)
    watch_every_optimizer()
    return True


def _outcome(record: ReplicaRecord, ranks: int, why: str | None) -> str:
    ranks_now = f"{ranks} rank{'s' * (ranks != 1)}"
    if why is not None:
        return f"continuing with one share for each of {ranks_now}, and sums and random numbers differ, for {why}"
    differs = "" if record.rounding is None else f", with sums that round otherwise, for {record.rounding}"
    return f"continuing with logical_replicas={record.count} on {ranks_now}{differs}; logical_replicas=0 turns it off"


def _obstacle(record: ReplicaRecord, context: Context) -> str | None:
    """Return why the ranks cannot continue as the replicas of a checkpoint, as the end of a sentence; else None."""
    if record.obstacle is not None:
        return record.obstacle
    if record.count < context.readers.count:
        return "there are more ranks than shares of a batch"
    if record.has_means and not record.is_asked and record.count % context.readers.count:
        return "its loop averages over the ranks at every batch, and some would have more batches than others"
    if context.split is not None:
        return 'balance="samples" splits global batches by the speed of ranks'
    actions = {action.phase for each in distributed_optimizers() for action in optimizer_record(each).actions}
    if StepPhase.SCALE_LEARNING_RATE in actions:
        return "scale_lr follows the number of ranks"
    return next((why for model in distributed_models() if (why := _why_not(model, record, context)) is not None), None)


def _why_not(model: nn.Module, record: ReplicaRecord, context: Context) -> str | None:
    """Return why a model that is distributed cannot be trained by replicas from now on."""
    applied = applied_to(model)
    assert applied is not None
    if applied.plan.step.scaler is not None:
        return "float16 scales losses by what all ranks saw"
    if record.index is None and applied.plan.world_size != context.readers.count:
        return "ranks hold parts of the model, and the checkpoint is of a version that did not note which"
    plan = _with_replicas(applied.plan, record)
    try:
        check_statistics(model, plan)
    except PlanError as error:
        return str(error).rstrip(".")
    return why_inexact(plan, is_shared=record.count > context.readers.count)


def _with_replicas(plan: Plan, record: ReplicaRecord) -> Plan:
    """Return a Plan that splits batches over what a checkpoint was trained with."""
    step = plan.step.model_copy(update={"replicas": record.count, "replica_threads": record.threads, "shares": None})
    return plan.model_copy(update={"step": step})


def _split(model: nn.Module, record: ReplicaRecord, context: Context) -> None:
    """Add up the gradients of a model over replicas from now on. Collective."""
    applied = applied_to(model)
    assert applied is not None
    plan = _with_replicas(applied.plan, record)
    mesh = Mesh.of(plan, context)
    context.mesh_readers = mesh.readers()
    assignment = assign_replicas(record.count, mesh.size(mesh.batch_axes))
    split_over_replicas(plan, assignment, mesh, context)
    update = sharded_update(plan, applied.shape) if applied.is_sharded else None
    reducer = reduce_over_replicas(plan, model, mesh, update, applied, context)
    if reducer is not None and applied.drift is not None:
        reducer.after_exchange = applied.drift.exchanged
    model_record(model).applied = replace(applied, plan=plan, reducer=reducer)
