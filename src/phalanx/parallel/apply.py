"""Make a model and an optimizer train the way a Plan says.

One stated order: compare model and Plan over the ranks; check the Plan against model, mesh and version; broadcast;
tables; tensor parallel; how modules compute; stages, sharding or data parallel. Objects go in and the same objects come
out; `state_dict` keys stay those of the plain model.
"""

from __future__ import annotations

import logging
import sys
import weakref
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils.weak import WeakTensorKeyDictionary

import phalanx.comm.context as context_of
from phalanx.comm.agreement import agree
from phalanx.comm.context import Context
from phalanx.comm.groups import name_axes
from phalanx.errors import ConfigError, PlanError
from phalanx.parallel.data_parallel import Reducer
from phalanx.parallel.describe import is_handle, is_module_held, owner_of, shape_of
from phalanx.parallel.fits import check_fits, sharded_update
from phalanx.parallel.flat import stored
from phalanx.parallel.measure import layer_kinds
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.tensor.swap import cut_layers
from phalanx.plan.buckets import all_reduce_buckets
from phalanx.plan.explain import Explanation
from phalanx.plan.explain import explain as explain_plan
from phalanx.plan.mesh import reduced_along
from phalanx.plan.mesh_rules import STAGE_AXIS
from phalanx.plan.server_rules import DENSE
from phalanx.plan.shape import ModelShape, ParamShape
from phalanx.plan.value import AllReduce, Average, Plan, Push, ReduceScatter, Server, TopK

if TYPE_CHECKING:  # only jobs that need it wait for it
    from torch.optim import Optimizer

    from phalanx.parallel.pipeline import Pipeline
    from phalanx.parallel.updates import Updater

logger = logging.getLogger("phalanx.parallel")


@dataclass(frozen=True, slots=True)
class Applied:
    """What was made of one model."""

    plan: Plan
    shape: ModelShape
    reducer: Reducer | None
    """None with one rank, and when no gradient is reduced over the ranks."""

    is_sharded: bool = False
    """Whether ranks hold a part of its parameters each."""

    updaters: tuple[Updater, ...] = ()
    """What acts around the steps of its optimizers."""

    pipeline: Pipeline | None = None
    """This rank's stages of it, if it is cut into stages."""


_applied: weakref.WeakKeyDictionary[nn.Module, Applied] = weakref.WeakKeyDictionary()
_cared_for = WeakTensorKeyDictionary()
"""Every parameter of a distributed model, by identity: its name, and whether it was trainable then."""


def applied_to(model: nn.Module) -> Applied | None:
    """Return what `apply` made of this module, or None."""
    return _applied.get(model)


def applied() -> list[Applied]:
    """Return what `apply` made of every module that still lives."""
    return list(_applied.values())


def distributed_models() -> list[nn.Module]:
    """Return every distributed module that still lives, in the order in which they were distributed."""
    return list(_applied)


def is_cared_for(param: Tensor) -> bool:
    """Return whether a distributed model, or an optimizer's table, takes care of this parameter's gradient."""
    tables = sys.modules.get("phalanx.ps.attach")
    if tables is not None and tables.holds(param):
        return True
    return is_module_held(param) or _cared_for.get(param, ("", False))[1]


def name_of(param: Tensor) -> str | None:
    """Return the plain name of a parameter that is in a distributed model now, or was when it was distributed."""
    for model in _applied:
        for name, member in model.named_parameters():
            if member is param:
                return name
    name, _ = _cared_for.get(param, (None, False))
    return name  # type: ignore[no-any-return]


def explain(model: nn.Module, *inputs: Any, optimizer: Optimizer | None = None) -> Explanation:
    """Say what the Plan applied to a model does to it: what lives where, what travels, and why.

    `print` shows a table; `to_json()` gives the same for programs. Not collective, unless inputs are given.

    Args:
        model: A distributed model.
        *inputs: Arguments of its forward pass. When given, one pass measures which kinds of layers hold the parameters
            and which compute, and one in training what is kept for the backward pass; every rank must call it, if
            layers are cut over ranks.
        optimizer: Its optimizer, whose state then counts as memory of this rank.

    Raises:
        ConfigError: If the model is not distributed.
    """
    made = _applied.get(model)
    if made is None:
        raise ConfigError(
            f"explain needs a distributed model, and this {type(model).__name__} is not. Call distribute or "
            "distributed_model first; for a Plan that is not applied there is phalanx.plan.explain(plan, shape)."
        )
    from phalanx.parallel.kept_memory import activation_bytes, as_trained, is_averaged, state_of

    shape = as_trained(made.shape, model)
    found = explain_plan(
        made.plan,
        shape,
        layer_kinds(model, inputs) if inputs else (),
        rank=context_of.current().rank,
        state=None if optimizer is None else state_of(optimizer),
        averaged=is_averaged(model),
    )
    if not inputs or _computes_elsewhere(made):
        return found
    return replace(found, activation_bytes=activation_bytes(model, inputs))


def _computes_elsewhere(made: Applied) -> bool:
    """Return whether a forward pass in training does more than this process can count, or may not be tried."""
    is_ours = made.is_sharded or made.pipeline is not None or bool(made.plan.tables)
    return is_ours or made.plan.step.compiled


def apply(plan: Plan, model: nn.Module) -> nn.Module:
    """Prepare a module, in place, to train the way a Plan says.

    Collective: every rank calls it with its copy of the module; rank 0's parameters and buffers reach all others.

    Args:
        plan: The Plan; equal on all ranks.
        model: A plain module, on any device; it is moved to this rank's.

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
    check_fits(plan, model, shape, context)
    model.to(context.device)
    mesh, reducer = Mesh.of(plan, context), None
    if dist.is_initialized():
        _set_readers(mesh, context)
    name_axes(mesh.axes())
    # A worker that was started again alone reads what it needs from the servers.
    averages = any(not isinstance(plan.rule_for(p.name).update, Push) for p in shape.trainable)
    if dist.is_initialized() and context.is_distributed and plan.step.broadcast:
        # On servers the first values are told again when an optimizer takes the parameters.
        broadcast_from_first_rank(model, level=logging.INFO if averages else logging.DEBUG)
    if plan.tables:
        _attach_tables(plan, model)
    if context.is_distributed:
        cut_layers(plan, model, mesh)
    _prepare_modules(plan, model, context)
    update = sharded_update(plan, shape) if context.is_distributed else None
    pipeline = _cut_stages(plan, model, mesh, context) if mesh.size((STAGE_AXIS,)) > 1 else None
    if pipeline is not None:
        reducer = pipeline.reducer
    elif context.is_distributed:
        reducer = _reduce(plan, model, mesh, update, context)
    updaters = _updaters(plan, model, mesh, context, reducer) if context.is_distributed else ()
    _applied[model] = Applied(plan, shape, reducer, update is not None, updaters, pipeline)
    for name, param in model.named_parameters():
        _cared_for[param] = (name, param.requires_grad)
    return model


def _set_readers(mesh: Mesh, context: Context) -> None:
    """Let loaders and metrics know which ranks read the same rows."""
    readers = mesh.readers()
    if applied() and readers != context.readers:
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
        ConfigError: If it is no module, or a lazy layer has no parameters yet.
        PlanError: If it, or one of its parameters, is distributed already.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"expected a torch.nn.Module to distribute, found {type(model).__name__}.")
    if model in _applied:
        raise PlanError("this model is distributed already; call distributed_model or distribute once per model.")
    for name, param in model.named_parameters():
        if isinstance(param, UninitializedParameter):
            raise ConfigError(
                f"parameter {name!r} has no shape yet (a lazy layer). Run one forward pass before distributing."
            )
        # Models may share a table.
        if param in _cared_for and not is_handle(param):
            raise PlanError(
                f"parameter {name!r} is distributed already, as {_cared_for[param][0]!r} of another model. Distribute "
                "one module that holds both."
            )


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


def _attach_tables(plan: Plan, model: nn.Module) -> None:
    """Name the tables of a model, and say which of its dense parameters live on servers."""
    from phalanx.ps import attach  # a job without tables does not wait for this

    rules = {name: plan.rule_for(name) for name, _ in model.named_parameters()}
    push = next(rule.update for rule in rules.values() if isinstance(rule.update, Push))
    dense = any(isinstance(rule.place, Server) and rule.place.table == DENSE for rule in plan.params)
    attachment = attach.current()
    attachment.configure(push, dense=dense)
    for name, param in model.named_parameters():
        place = rules[name].place
        if is_handle(param):
            assert isinstance(place, Server)
            attachment.claims.name(param, place.table)
        elif isinstance(place, Server) and place.table != DENSE:
            from phalanx.ps.placed import place_embedding  # imports torch's compiler

            embedding = owner_of(name, model)
            assert isinstance(embedding, nn.Embedding)
            place_embedding(embedding, place.table, attachment)
        else:
            attachment.place(param, on_servers=isinstance(place, Server))


def _reduce(plan: Plan, model: nn.Module, mesh: Mesh, update: ReduceScatter | None, context: Context) -> Reducer | None:
    if update is not None:
        return _shard(plan, model, mesh, update, context)
    if all_reduce_buckets(plan, shape_of(model)):
        return _data_parallel(plan, model, mesh, context)
    scale_module_held(plan, model, mesh)
    return None


def _data_parallel(plan: Plan, model: nn.Module, mesh: Mesh, context: Context) -> Reducer:
    if not dist.is_initialized():
        raise PlanError(
            f"worker {context.rank} was started again alone, and this Plan averages gradients by all-reduce, which "
            "needs all workers. Keep dense parameters on the servers, a_sync_configs = "
            '{"dense": "server"}, where workers are to be started again.'
        )
    scale_module_held(plan, model, mesh)
    buckets = all_reduce_buckets(plan, shape_of(model))
    gradients = sum(len(bucket.params) for bucket in buckets)
    logger.info("Find all_reduce operators: %d. After fusion: %d -> %d.", gradients, gradients, len(buckets))
    return Reducer(model, buckets, mesh, context, sync_buffers=plan.step.sync_buffers)


def scale_module_held(plan: Plan, model: nn.Module, mesh: Mesh) -> None:
    """Divide the gradients to which no other rank adds: their layers' collectives bring those of all rows here."""
    for name, param in model.named_parameters():
        rule = plan.rule_for(name)
        if param.requires_grad and isinstance(rule.update, AllReduce) and not reduced_along(plan, rule):
            count = mesh.size(plan.step.batch_axes) if rule.update.reduce == "mean" else 1
            if count > 1:
                param.register_hook(partial(torch.mul, other=1.0 / count))


def _prepare_modules(plan: Plan, model: nn.Module, context: Context) -> None:
    """Change how modules compute, in place; what is not asked for is not imported."""
    if plan.step.sync_bn and context.readers.count > 1:
        from phalanx.parallel.sync_batch_norm import keep_out_of_graph, synchronise

        sharded = any(isinstance(rule.update, ReduceScatter) for rule in plan.params)
        if not synchronise(model, context, context.readers.group, is_weighed=sharded):
            logger.warning("sync_batch_norm does not act: the model has no batch normalisation.")
        if plan.step.compiled:
            keep_out_of_graph()
    if any(rule.recompute != "none" or rule.offload for rule in plan.modules):
        from phalanx.parallel.recompute import apply_recompute

        apply_recompute(plan.modules, model)
    whole = next((rule for rule in plan.modules if rule.match == "" and rule.dtype is not None), None)
    if whole is not None and whole.dtype is not None:
        from phalanx.parallel.precision import apply_precision

        keep = [rule.match for rule in plan.modules if rule.match and rule.dtype == "float32"]
        apply_precision(model, whole.dtype, pure=whole.pure, keep=keep)
    if plan.step.compiled:
        # In place, so that the module and its state_dict keys stay as they were.
        model.compile()


def _updaters(
    plan: Plan, model: nn.Module, mesh: Mesh, context: Context, reducer: Reducer | None
) -> tuple[Updater, ...]:
    if not any(isinstance(rule.update, (Average, TopK)) for rule in plan.params):
        return ()
    from phalanx.parallel.updates import make_updaters

    return make_updaters(plan, model, mesh, context, reducer)


def _cut_stages(plan: Plan, model: nn.Module, mesh: Mesh, context: Context) -> Pipeline:
    from phalanx.parallel import pipeline  # a job without stages does not wait for this

    made = pipeline.cut(plan, model, mesh, context)
    buckets = all_reduce_buckets(plan, shape_of(model))
    for bucket in buckets:
        mesh.group(bucket.axes)  # made by all ranks, whatever their stages hold
    scale_module_held(plan, model, mesh)
    held = {name for name, param in model.named_parameters() if not param.is_meta}
    mine = ModelShape(tuple(param for param in shape_of(model).params if param.name in held))
    if mesh.size(mesh.batch_axes) > 1:
        buckets, buffers = all_reduce_buckets(plan, mine), plan.step.sync_buffers
        made.reducer = Reducer(model, buckets, mesh, context, sync_buffers=buffers, overlapped=False)
    return made


def _shard(plan: Plan, model: nn.Module, mesh: Mesh, update: ReduceScatter, context: Context) -> Reducer:
    from phalanx.parallel import sharded  # a job that shards nothing does not wait for this

    sharded.shard(plan, model, mesh, update)
    reducer = Reducer(model, (), mesh, context, sync_buffers=plan.step.sync_buffers)
    sharded.weigh_outputs(model, reducer, context)
    return reducer
