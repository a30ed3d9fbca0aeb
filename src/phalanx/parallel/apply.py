"""`apply`: apply a Plan to a model: tensor parallel, pipeline stages, ZeRO or data parallel, precision.

One stated order: compare model and Plan over the ranks; check the Plan against model, mesh and version; broadcast;
tables; tensor parallel; single operators; how modules compute; stages, sharding or data parallel. Objects go in and the
same objects come out; `state_dict` keys stay those of the plain model.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

import phalanx.comm.context as context_of
from phalanx.comm.agreement import agree
from phalanx.comm.context import Context
from phalanx.comm.groups import name_axes
from phalanx.errors import ConfigError, PlanError
from phalanx.parallel.balance.setup import use_split
from phalanx.parallel.checks.replica_check import VARIABLE, compare_every, watch
from phalanx.parallel.checks.wrappers import check_unwrapped
from phalanx.parallel.data.bucket_buffers import stored
from phalanx.parallel.data.forward_passes import follow_forward_passes
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.model_shape import is_handle, is_module_held, shape_of
from phalanx.parallel.replicas.assign import use_replicas
from phalanx.parallel.replicas.exactness import check_statistics
from phalanx.parallel.session import Applied, applied_to, list_applied, session, set_applied
from phalanx.parallel.techniques import (
    attach_tables,
    check_operators,
    place_operators,
    prepare_modules,
    reduce_gradients,
    split_stages,
    updaters_of,
)
from phalanx.parallel.tensor.apply_styles import shard_layers
from phalanx.parallel.validate import check_fits, sharded_update
from phalanx.parallel.zero.elastic_plan import describe, with_whole_gradients
from phalanx.plan.files import write_run_plan
from phalanx.plan.mesh import is_sum_of_ranks
from phalanx.plan.rules.mesh import STAGE_AXIS
from phalanx.plan.rules.unmatched import check_rules
from phalanx.plan.shape import ModelShape, ParamShape
from phalanx.plan.value import Plan, Push

logger = logging.getLogger("phalanx.parallel")


def apply(plan: Plan, model: nn.Module, *, is_derived: bool = False) -> nn.Module:
    """Prepare a module, in place, to train the way a Plan says.

    Collective: every rank calls it with its copy of the module; rank 0's parameters and buffers reach all others.

    Args:
        plan: The Plan; equal on all ranks.
        model: A plain module, on any device; it is moved to this rank's.
        is_derived: Whether a strategy made the Plan: several models may have one, so a rule may match nothing of this
            one.

    Returns:
        The same module.

    Raises:
        PlanError: If the Plan does not fit the model or the ranks, or says something this version does not do.
        ConfigError: If the module cannot be distributed, or ranks disagree about Plan or model; names which and in
            what.
    """
    context = context_of.init()
    if not isinstance(plan, Plan):
        raise PlanError(
            f"expected a phalanx Plan, found {type(plan).__name__}. Read one from a file with phalanx.plan.load_plan."
        )
    check_model(model)
    shape = shape_of(model)
    agree("model", {p.name: _looks(p) for p in shape.params})
    agree("buffers", {n: [list(b.shape), str(b.dtype)] for n, b in model.named_buffers() if not is_module_held(b)})
    agree("plan", plan.model_dump(mode="json", exclude={"because"}))
    agree(VARIABLE, compare_every())
    check_fits(plan, model, shape, context)
    _check_rules(plan, model, is_derived=is_derived)
    check_operators(plan, model)
    _check_embeddings(plan, model, context)
    model.to(context.device)
    mesh, reducer = Mesh.of(plan, context), None
    if dist.is_initialized() or not context.is_distributed:
        _set_readers(mesh, context)
        use_replicas(plan, mesh, context)
        check_statistics(model, plan)
        use_split(plan, mesh, context)
    name_axes(mesh.axes())
    plan, mirror = _elastic_plan(plan, shape, context)
    # A worker that was started again alone reads what it needs from the servers.
    averages = any(not isinstance(plan.rule_for(p.name).update, Push) for p in shape.trainable)
    if dist.is_initialized() and context.is_distributed and plan.step.broadcast:
        # On servers the first values are told again when an optimizer takes the parameters.
        broadcast_from_first_rank(model, level=logging.INFO if averages else logging.DEBUG)
    if plan.tables:
        attach_tables(plan, model)
    if context.is_distributed:
        shard_layers(plan, model, mesh)
        place_operators(plan, model, mesh)
    prepare_modules(plan, model, context)
    update = sharded_update(plan, shape) if context.is_distributed else None
    pipeline = split_stages(plan, model, mesh, update, context) if mesh.size((STAGE_AXIS,)) > 1 else None
    if pipeline is not None:
        reducer = pipeline.reducer
    elif context.is_distributed or context.replicas is not None:
        reducer = reduce_gradients(plan, model, mesh, update, context)
    follow_forward_passes(model, is_sum=is_sum_of_ranks(plan))
    updaters = updaters_of(plan, model, mesh, context, reducer) if context.is_distributed else ()
    is_sharded, drift = update is not None and pipeline is None, watch(plan, model, context.device)
    applied = Applied(plan, shape, reducer, is_sharded, updaters, pipeline, drift, mirror)
    set_applied(model, applied)
    _schedule_comparisons(model, applied)
    # Of several models the first one's: who looks at a run wants one answer.
    is_joining = context.recovery is not None and context.recovery.membership.is_joining
    if context.role.log_dir and context.rank == 0 and len(list_applied()) == 1 and not is_joining:
        write_run_plan(plan, shape, Path(context.role.log_dir))
    return model


def _elastic_plan(plan: Plan, shape: ModelShape, context: Context) -> tuple[Plan, int | None]:
    """Return the Plan with whole gradients and how many mirrors a shard has, where a rank's loss is survived."""
    if context.recovery is None or (sharding := sharded_update(plan, shape)) is None:
        return plan, None
    context.recovery.is_sharded = True
    if context.rank == 0:
        logger.log(logging.INFO if sharding.mirror else logging.WARNING, "%s", describe(sharding, shape))
    return with_whole_gradients(plan), sharding.mirror


def _schedule_comparisons(model: nn.Module, applied: Applied) -> None:
    """Compare replicas at what all ranks reach equally often: else at the steps of the model's optimizers."""
    drift = applied.drift
    if drift is None or applied.is_sharded:  # while a sharded model computes, its parameters are gathered
        return
    if applied.reducer is not None:
        applied.reducer.after_exchange = drift.exchanged
    elif applied.pipeline is not None:
        applied.pipeline.checks.append(drift)
    elif not applied.updaters:
        model.register_forward_pre_hook(drift)


def _check_rules(plan: Plan, model: nn.Module, *, is_derived: bool) -> None:
    """Raise if a rule of a given Plan is about nothing of the whole model."""
    if is_derived:
        return
    first = {id(param): name for name, param in model.named_parameters()}
    params = {name: first[id(param)] for name, param in model.named_parameters(remove_duplicate=False)}
    check_rules(plan, params=params, modules={name for name, _ in model.named_modules(remove_duplicate=False)})


def _check_embeddings(plan: Plan, model: nn.Module, context: Context) -> None:
    """Raise if a layer does something to its table that depends on all rows of the batch, of which each rank has some.

    Raises:
        ConfigError: Names the layer, and what to do instead.
    """
    for name, module in model.named_modules():
        is_alone = not context.is_distributed or plan.tables  # which have rules of their own
        if is_alone or not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        if module.max_norm is not None:
            raise ConfigError(
                f"{name!r} has max_norm={module.max_norm}, which scales the rows that are looked up, in the forward "
                "pass: each rank would scale those of its own batch, and the ranks' tables come apart. Remove "
                "max_norm, and scale all rows after the optimizer's step: weight.copy_(torch.renorm(weight, 2, 0, "
                f"{module.max_norm})) under torch.no_grad()."
            )
        if module.scale_grad_by_freq:
            raise ConfigError(
                f"{name!r} has scale_grad_by_freq, which counts how often a row is in the batch: each rank would count "
                "in its own rows only. Remove it, or train in one process."
            )


def _set_readers(mesh: Mesh, context: Context) -> None:
    """Let loaders and metrics know which ranks read the same rows."""
    readers = mesh.readers()
    before = context.readers
    if list_applied() and readers.replicas != before.replicas:
        raise PlanError(
            f"this Plan has {readers.replicas or 'no'} logical replicas, the Plan of the model before "
            f"{before.replicas or 'none'}. Models of one process share the global batch: give both the same number."
        )
    if list_applied() and readers != before:
        raise PlanError(
            f"this Plan lets {readers.count} ranks read rows of their own, the Plan of the model before "
            f"{context.readers.count}. One job reads its rows one way: give both Plans the same mesh and batch_axes."
        )
    context.mesh_readers = readers


def _looks(param: ParamShape) -> dict[str, object]:
    """Return what of a parameter must be the same on all ranks, by words for the message."""
    return {"shape": None if param.is_distributed else list(param.shape), "dtype": param.dtype}


def check_model(model: nn.Module) -> None:
    """Raise unless this is a module that can be distributed and was not yet.

    Raises:
        ConfigError: If it is no module, a lazy layer has no parameters yet, or a wrapper distributes it.
        PlanError: If it, or one of its parameters, is distributed already.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"expected a torch.nn.Module to distribute, found {type(model).__name__}.")
    if applied_to(model) is not None:
        raise PlanError("this model is distributed already; call distributed_model or distribute once per model.")
    for name, param in model.named_parameters():
        if isinstance(param, UninitializedParameter):
            raise ConfigError(
                f"parameter {name!r} has no shape yet (a lazy layer). Run one forward pass before distributing."
            )
        # Models may share a table.
        if param in session.parameters and not is_handle(param):
            raise PlanError(
                f"parameter {name!r} is distributed already, as {session.parameters[param][0]!r} of another model. "
                "Distribute one module that holds both."
            )
    check_unwrapped(model)


@torch.no_grad()
def broadcast_from_first_rank(model: nn.Module, *, level: int = logging.INFO) -> None:
    """Give every rank rank 0's parameters and buffers, one broadcast per dtype. Shards held by a layer stay.

    Collective.

    Args:
        model: The model.
        level: How loud the log says so.
    """
    logger.log(level, "first broadcast start")
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if not is_module_held(tensor) and tensor.numel():
            by_dtype.setdefault(tensor.dtype, []).append(stored(tensor.detach()))
    for tensors in by_dtype.values():
        flat = torch.cat([t.reshape(-1) for t in tensors])
        dist.broadcast(flat, src=0)
        for tensor, piece in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(piece.view(tensor.shape))
    logger.log(level, "first broadcast done")
