"""`px.distribute`: distribute a model, its optimizer and its data in one call."""

from __future__ import annotations

import os
from typing import Any, Literal, TypeVar

from torch import nn
from torch.optim import Optimizer

from phalanx.cluster.env.environment import REPLAY_VARIABLE
from phalanx.comm.context import current
from phalanx.data.loader.loader import ShardedLoader
from phalanx.errors import ConfigError
from phalanx.parallel.checks.misuse import ACTS_AT_UPDATES, check_trains
from phalanx.parallel.distribute import add_model, add_optimizer, agreed_loader, announce, join, use_strategy
from phalanx.parallel.session import TrainingRequest, session
from phalanx.plan.value import Plan
from phalanx.strategy import DistributedStrategy
from phalanx.train.loss.batch_norm_check import check_batch_norms

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)
ModelT = TypeVar("ModelT", bound=nn.Module)


def distribute(
    model: ModelT,
    optimizer: OptimizerT | None = None,
    data: Any = None,
    *,
    global_batch: int | None = None,
    strategy: DistributedStrategy | None = None,
    plan: Plan | None = None,
    replicas: int | None = None,
    balance: Literal["replicas", "samples"] | None = None,
    mirror: Literal[0, 1] | None = None,
    **loader_options: Any,
) -> tuple[ModelT, OptimizerT | None, ShardedLoader | None]:
    """Make a model, its optimizer and its data train on all ranks.

    Collective: every rank calls it. Works with one process and no launcher too. On a parameter server it serves until
    all workers have left, and ends the process. Model, optimizer and data may be made before or after `phalanx.init()`,
    which this calls if nobody did.

    Args:
        model: A plain module; changed in place, keys and class stay.
        optimizer: A torch optimizer over the model's parameters.
        data: A torch `Dataset` or `DataLoader`, a tuple of tensors, an `IterableDataset` or a generator function.
        global_batch: Samples of one optimizer step over all ranks. A `DataLoader`'s own batch size is per rank.
        strategy: Settings; the defaults when omitted.
        plan: A Plan to apply instead of the one the strategy makes. For one that places single operators, the step that
            it is of is captured here, from a batch of the data.
        replicas: Logical replicas over which every global batch is split: the trained weights have the same bits on any
            number of ranks up to it. As `strategy.logical_replicas`. When omitted one for each rank, and on fewer ranks
            than a checkpoint was trained with, as many as it was; when 0 always one for each rank.
        balance: What faster ranks get more of, as `strategy.balance`: logical replicas, or without these samples of
            each global batch, whose size stays. Even parts when omitted.
        mirror: 1 lets each rank keep the optimizer state of the next one too, where `strategy.sharding` is on, so that
            nothing is lost with a rank that others continue without. As `strategy.sharding_configs["mirror"]`.
        **loader_options: Passed to `ShardedLoader` (`shuffle`, `seed`, `drop_last`, `num_workers`, ...).

    Returns:
        The same model, the same optimizer, and the loader to iterate over.

    Raises:
        ConfigError: If something cannot work; the same error on all ranks, before training starts.
    """
    join("distribute")
    if plan is not None and strategy is not None:
        raise ConfigError("give a strategy or a plan, not both: a strategy makes a plan.")
    if isinstance(model, nn.Module) and isinstance(optimizer, Optimizer):
        check_trains(model, optimizer)
    overrides = {"replicas": replicas, "balance": balance, "mirror": mirror}
    if any(value is not None for value in overrides.values()):
        strategy = _with_overrides(strategy, plan, overrides)
    use_strategy(strategy)
    loader = agreed_loader(data, global_batch, loader_options)
    if loader is not None:  # a stream has no length, and so no truth
        session.loader = loader
    if session.planner is not None and loader is not None:
        session.planner(TrainingRequest(model=model, optimizer=optimizer, strategy=session.strategy))
    if isinstance(plan, Plan) and loader is not None:
        from phalanx.train.model.planning import (
            prepare_for_plan,
        )  # a job without a Plan of its own does not wait for this

        prepare_for_plan(model, loader, plan)
    at_updates = not ACTS_AT_UPDATES.isdisjoint(use_strategy(None).techniques)
    add_model(model, plan, expects_optimizer=optimizer is None and at_updates)
    check_batch_norms(model, loader)
    if optimizer is not None:
        add_optimizer(optimizer)
    if loader is not None and current().recovery is not None:
        loader.share_state()
    if os.environ.get(REPLAY_VARIABLE):
        from phalanx.checkpoint.loading import load_for_replay  # no other job waits for this

        load_for_replay(model, optimizer, loader)
    announce(optimizer, loader)
    return model, optimizer, loader


def _with_overrides(
    strategy: DistributedStrategy | None, plan: Plan | None, words: dict[str, Any]
) -> DistributedStrategy:
    """Return the strategy with the settings given as arguments beside it."""
    if plan is not None:
        word = next(word for word, value in words.items() if value is not None)
        says = "its updates" if word == "mirror" else f"step.{word}"
        raise ConfigError(f"give {word} or a plan, not both: a plan says {says} itself.")
    strategy = (strategy or use_strategy(None)).model_copy()
    if words["replicas"] is not None:
        strategy.logical_replicas = words["replicas"]
    if words["balance"] is not None:
        strategy.balance = words["balance"]
    if words["mirror"] is not None:
        if not strategy.sharding:
            raise ConfigError(
                f"mirror={words['mirror']} was asked for, which is about shards of optimizer state, and "
                "strategy.sharding is off. Set strategy.sharding = True, or leave mirror out."
            )
        strategy.sharding_configs = {**strategy.sharding_configs, "mirror": words["mirror"]}
    return strategy
