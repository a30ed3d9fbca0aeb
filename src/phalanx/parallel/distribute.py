"""Distribute models and optimizers: strategy to Plan to `apply`; behind `px.distribute`, `px.Model` and Fleet."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.utils.data import IterableDataset

import phalanx.comm.context as context_of
from phalanx.cluster.env.environment import Environment
from phalanx.comm.agreement import agree
from phalanx.comm.context import Context
from phalanx.data.loader.loader import ShardedLoader
from phalanx.errors import ConfigError, PlanError, RoleError, StrategyError
from phalanx.parallel.apply import apply, check_model
from phalanx.parallel.balance.setup import balance_updates
from phalanx.parallel.checks.misuse import ForwardWatch, plan_at_first_call, refuse_outer_wrapper
from phalanx.parallel.checks.same_samples_check import SampleWatch
from phalanx.parallel.checks.step_check import StepWatch, watch_every_optimizer
from phalanx.parallel.elastic.peer_state import ModelState, OptimizerState
from phalanx.parallel.memory.guard.guarded_model import guard_memory
from phalanx.parallel.memory.guard.guarded_step import guard_step
from phalanx.parallel.model_shape import shape_of
from phalanx.parallel.old_words import refuse_old_words, with_old_words
from phalanx.parallel.replicas.gate import hold_updates
from phalanx.parallel.session import (
    StepPhase,
    applied_to,
    distributed_models,
    distributed_optimizers,
    is_distributed_optimizer,
    list_applied,
    model_record,
    optimizer_record,
    session,
)
from phalanx.parallel.step.gate import follow_torch_scaler
from phalanx.parallel.step.hooks import add_action
from phalanx.parallel.step.learning_rate import apply_factor, factor_for
from phalanx.parallel.step.shared_loss import share_losses
from phalanx.parallel.tensor.shard_api import describe_shards, has_shard_requests, with_shard_requests
from phalanx.parallel.update.optimizer_setup import set_up_optimizer
from phalanx.plan.rules.rules import plan_from_strategy
from phalanx.plan.value import Plan
from phalanx.strategy import DistributedStrategy, check_strategy
from phalanx.strategy.configs import ContextParallelConfigs

logger = logging.getLogger("phalanx.parallel")

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)
ModelT = TypeVar("ModelT", bound=nn.Module)


def use_strategy(strategy: DistributedStrategy | None) -> DistributedStrategy:
    """Set the strategy of this process, or return the one in use when None; the default one if there is none.

    Models that train side by side have one strategy: it says how each optimizer goes with each model. Once all models
    of one are gone, the next may have another.

    Raises:
        StrategyError: If a model that lives was distributed under a different strategy; names it and what differs.
    """
    if strategy is not None:
        strategy = check_strategy(strategy)
        if session.strategy not in (None, strategy) and list_applied():
            # Models and optimizers refer to each other through hooks, and what those held may be such a ring again.
            for _ in range(2):
                if distributed_models():
                    gc.collect()
            if models := distributed_models():
                raise StrategyError(_explain_strategies(models[0], session.strategy, strategy))
        session.strategy = strategy
    return session.strategy or DistributedStrategy()


def _explain_strategies(model: nn.Module, first: DistributedStrategy | None, second: DistributedStrategy) -> str:
    before, now = (first or DistributedStrategy()).model_dump(), second.model_dump()
    names = [name for name in now if now[name] != before[name]]
    return (
        f"a strategy was given while a {type(model).__name__} that was distributed under another is alive; they differ "
        f"in {', '.join(names)}. Models of one process have one strategy: give it once, to init or to the first call. "
        "For models one after the other, let go of the first before: del model, optimizer and all that refers to them."
    )


def add_model(model: ModelT, plan: Plan | None = None, *, expects_optimizer: bool = False) -> ModelT:
    """Distribute a model under the strategy in use, or under a Plan. Collective; returns the same module.

    Args:
        model: A plain module.
        plan: A Plan to apply instead of the one the strategy makes.
        expects_optimizer: Whether to warn when training starts and no optimizer was handed over.
    """
    context = join("distributed_model")
    if session.planner is not None:  # it will be trained nowhere, and may ask for more ranks than there are
        model.register_forward_pre_hook(plan_at_first_call, with_kwargs=True)
        return model
    plan = plan or _launched_plan()
    is_derived = plan is None
    if plan is None:
        check_model(model)
        strategy = _with_replicas(use_strategy(None))
        agree("strategy", {**strategy.model_dump(mode="json"), "px.shard": describe_shards(model)})
        plan = plan_from_strategy(strategy, shape_of(model), context.world_size, len(context.role.server_endpoints))
        plan = with_shard_requests(plan, model, strategy.config(ContextParallelConfigs).attention)
        if context.rank == 0 and not list_applied():
            for warning in strategy.idle():
                logger.warning("%s", warning)
    elif has_shard_requests(model):
        raise PlanError("px.shard was called for this model, and a Plan was given. Use one: a Plan has styles too.")
    with _checked_numbers(model, context):
        apply(plan, model, is_derived=is_derived)
    for optimizer in distributed_optimizers():
        _set_up_optimizer(optimizer, model)
    applied = applied_to(model)
    if applied is not None and use_strategy(None).out_of_memory == "recompute":
        guard_memory(model, applied, context)
    _watch(model, context, expects_optimizer=expects_optimizer)
    return model


def _watch(model: nn.Module, context: Context, *, expects_optimizer: bool) -> None:
    """Look at what the script does with a distributed model, and let ranks that join take over its state."""
    if context.recovery is not None:
        ModelState(model)
    record = model_record(model)
    record.expects_optimizer = expects_optimizer
    # One that joins comes to its first forward passes when the others are long past theirs.
    record.forward_watch = ForwardWatch(SampleWatch() if context.recovery is None else _look_at_nothing)
    model.register_forward_hook(record.forward_watch, with_kwargs=True)
    if context.is_distributed:
        model.register_forward_pre_hook(refuse_outer_wrapper)
    if context.is_distributed or context.replicas is not None:
        watch_every_optimizer()


def _look_at_nothing(_inputs: tuple[Any, ...]) -> None:
    pass


@contextmanager
def _checked_numbers(model: nn.Module, context: Context) -> Iterator[None]:
    """Audit a model and check its steps if the strategy asks for it; the block distributes the model."""
    strategy = use_strategy(None)
    if not strategy.audit and not strategy.check_nan_inf:
        yield
        return
    from phalanx.parallel.numerics.audit import Audit  # a job without them does not wait for these
    from phalanx.parallel.numerics.nan_check import check_nan_inf

    audit = Audit(model, strategy.audit) if strategy.audit else None  # looks at gradients before the reducer does
    yield
    if audit is not None:
        audit.start(model, context)
        model_record(model).audit = audit
    if strategy.check_nan_inf:
        check_nan_inf()


def _launched_plan() -> Plan | None:
    """Return the Plan of the file that the environment names, for scripts that give none."""
    path = os.environ.get("PHALANX_PLAN")
    if not path:
        return None
    from phalanx.plan.files import load_plan

    return load_plan(path)


def _with_replicas(strategy: DistributedStrategy) -> DistributedStrategy:
    """Return a strategy with the logical replicas that `phalanx run --replicas` asks for, unless it says how many."""
    launched = Environment(os.environ).integer("PHALANX_REPLICAS", 0)
    if strategy.logical_replicas is not None or launched is None:
        return strategy
    return strategy.model_copy(update={"logical_replicas": launched})


def asked_replicas() -> int | None:
    """Return how many logical replicas script or launcher ask for; 0 for none, None if they say nothing."""
    return _with_replicas(use_strategy(None)).logical_replicas


def add_optimizer(optimizer: OptimizerT) -> OptimizerT:
    """Bind an optimizer to this job and return the same object.

    Adds learning-rate scaling if the strategy asks for it, checks before each step, and errors for old spellings.
    """
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"expected a torch.optim.Optimizer to distribute, found {type(optimizer).__name__}.")
    if is_distributed_optimizer(optimizer):
        raise ConfigError("this optimizer is distributed already; call distributed_optimizer or distribute once.")
    context, loader = join("distributed_optimizer"), session.loader
    follow_torch_scaler(optimizer)
    hold_updates(optimizer, context)
    add_action(optimizer, StepPhase.CHECK_PARAMETERS, StepWatch())
    _guard_step(optimizer, context)
    if isinstance(optimizer, LBFGS) and context.is_distributed:
        share_losses(optimizer)
    factor = factor_for(
        use_strategy(None),
        context.readers.shares if context.replicas is not None else context.world_size,
        None if loader is None else loader.global_batch,
        _steps_per_epoch(loader),
    )
    if factor is not None:
        apply_factor(optimizer, factor)
        logger.info("learning rate warms up over %d steps to %g x yours", factor.warmup_steps, factor.scale)
    if context.role.server_endpoints or not context.is_distributed:
        from phalanx.parallel.tables import tables_of  # a job that can have no table does not wait for this

        tables = tables_of(context, use_strategy(None))
        tables.add_optimizer(optimizer)
        add_action(optimizer, StepPhase.PUSH_TABLES, tables.before_step)
        add_action(optimizer, StepPhase.PULL_TABLES, tables.after_step)
    record = optimizer_record(optimizer)
    record.is_distributed, record.given_before = True, (context.batches.trained, context.batches.passes)
    if context.recovery is not None:
        OptimizerState(optimizer)
    for model in distributed_models():
        _set_up_optimizer(optimizer, model)
    refuse_old_words(optimizer)
    return optimizer


def _guard_step(optimizer: Optimizer, context: Context) -> None:
    if use_strategy(None).out_of_memory == "recompute":
        guard_step(optimizer, context.device)


def _set_up_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    applied = applied_to(model)
    assert applied is not None
    if (audit := model_record(model).audit) is not None and not audit.is_bound:
        audit.is_bound = True
        add_action(optimizer, StepPhase.CHECK_PARAMETERS, audit.before_update)
    set_up_optimizer(optimizer, model, applied, use_strategy(None), partial(without_reduction, model))
    balance_updates(optimizer, applied.plan, context_of.current())


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients on this rank inside the block; the first backward after it reduces the sum.

    Args:
        model: A distributed model.

    Raises:
        ConfigError: If the model is not distributed.
    """
    replicas = context_of.current().replicas if context_of.is_initialized() else None
    if replicas is None or not replicas.are_shared:
        with without_reduction(model):
            yield
        return
    applied = applied_to(model)
    if replicas.is_elastic or (applied is not None and applied.is_sharded):
        which = "ranks may leave and join" if replicas.is_elastic else "parameters are sharded"
        raise ConfigError(
            f"px.no_sync was called while ranks hold several logical replicas and {which}: gradients that were not "
            "added up could not be kept for each replica. Leave no_sync out, on any number of ranks."
        )
    with replicas.no_sync() if len(replicas.local) > 1 else without_reduction(model):
        yield


@contextmanager
def without_reduction(model: nn.Module) -> Iterator[None]:
    """Do what `no_sync` does, for gradient accumulation of our own."""
    applied = applied_to(model)
    if applied is None:
        raise ConfigError("no_sync needs a distributed model. Call distribute or distributed_model first.")
    if applied.reducer is None:
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(applied.reducer.no_sync())
        if applied.is_sharded:
            from phalanx.parallel.zero import sharded  # a job that shards nothing does not wait for this

            stack.enter_context(sharded.no_sync(model))
        yield


def DataParallel(model: ModelT) -> ModelT:  # noqa: N802 (the basic API's spelling)
    """Distribute a model the basic way: gradients are averaged over all ranks. Returns the same module.

    `model.scale_loss` and `model.apply_collective_grads` of older scripts are there and do nothing.
    """
    return with_old_words(add_model(model))


def join(verb: str) -> Context:
    """Return the Context, made now if need be. On a server: serve, and end the process when all workers have left.

    Raises:
        RoleError: If this process does not train; names `verb`, what was called.
    """
    context = context_of.init()
    if context.role.is_server:
        from phalanx.parallel.tables import serve

        serve()
        raise SystemExit(0)
    if not context.role.is_worker:
        raise RoleError(
            f"{verb} was called on {context.role.kind} {context.role.rank}, which does not train. Call it on workers "
            "only: ask fleet.is_worker() first."
        )
    return context


def agreed_loader(data: Any, global_batch: int | None, options: dict[str, Any]) -> ShardedLoader | None:
    """Return the loader, once all ranks cut their epochs alike; None without data. Collective.

    Raises:
        ConfigError: If they do not, or one cannot load; on all ranks.
    """
    try:
        loader = _loader_of(data, global_batch, options)
    except ConfigError as error:
        with suppress(ConfigError):  # how the others differ; here the error itself says more
            agree("data", {"cannot_load": str(error)})
        raise
    agree("data", _contract(loader))
    return loader


def _loader_of(data: Any, global_batch: int | None, options: dict[str, Any]) -> ShardedLoader | None:
    given_options = sorted(options if global_batch is None else {"global_batch", *options})
    if data is None and given_options:
        raise ConfigError(f"global_batch and loader options need data. Found none; options: {given_options}")
    if isinstance(data, ShardedLoader) and given_options:
        raise ConfigError(
            f"a ShardedLoader is set up already. Found {given_options} beside it: give them to ShardedLoader."
        )
    if data is None or isinstance(data, ShardedLoader):
        return data
    return ShardedLoader(data, global_batch=global_batch, **options)


def _contract(loader: ShardedLoader | None) -> dict[str, Any] | None:
    """Return what all ranks' loaders must have in common to cut one epoch between them."""
    if loader is None:
        return None
    # A stream that splits itself may have a length of its own on every rank.
    steps = None if isinstance(loader.dataset, IterableDataset) else _steps_per_epoch(loader)
    return {
        "cannot_load": None,
        "global_batch": loader.global_batch,
        "drop_last": loader.drops_last,
        "seed": loader.given_seed,
        "order": loader.ordering,
        "steps_per_epoch": steps,
    }


def _steps_per_epoch(loader: ShardedLoader | None) -> int | None:
    try:
        return loader.steps_per_epoch if loader is not None else None
    except TypeError:  # a stream has no length
        return None


def _parts_of_batch(loader: ShardedLoader, readers: int, part: str) -> str:
    """Return the rows of a full global batch, and how many of them each rank or replica reads, in words."""
    rows, most = loader.global_batch, loader.per_rank_batch
    if loader.has_batch_sampler:
        return f"= a batch of the batch sampler per {part} x {readers}"
    if rows % readers == 0:
        return f"{rows} = {most} per {part} x {readers}"
    if rows > readers:
        return f"{rows} = {most - 1} or {most} per {part}, on {readers}"
    return f"{rows} = 1 each on {rows} of {readers} {part}s, which leaves {readers - rows} without a row in every step"


def announce(optimizer: Optimizer | None, loader: ShardedLoader | None) -> None:
    """Say, on rank 0, what the ranks train with."""
    context = context_of.current()
    if context.rank:
        return
    if loader is not None:
        steps = _steps_per_epoch(loader) or "an unknown number of"
        parts = _parts_of_batch(loader, context.readers.shares, "rank" if context.replicas is None else "replica")
        logger.info("global batch %s; %s steps per epoch", parts, steps)
    if optimizer is not None:
        rates = sorted({float(group["lr"]) for group in optimizer.param_groups})
        logger.info("learning rate %s", ", ".join(f"{rate:g}" for rate in rates))
