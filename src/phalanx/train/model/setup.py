"""Distribute a Model's parts when they are first used: what `px.distribute` does, in the mode that was asked for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from phalanx.comm.context import Context
from phalanx.data.loader.loader import ShardedLoader
from phalanx.errors import ConfigError, did_you_mean
from phalanx.parallel.apply import applied_to
from phalanx.parallel.distribute import add_model, add_optimizer, agreed_loader, announce, use_strategy
from phalanx.parallel.session import assembly, check_trains
from phalanx.plan.files import load_plan, save_plan
from phalanx.plan.value import Plan
from phalanx.strategy import DistributedStrategy
from phalanx.train.loss.batches import check_loss
from phalanx.train.model.auto_context import auto_context
from phalanx.train.model.mode_rules import require_cuts, strategy_in
from phalanx.train.model.modes import ParallelMode


def check_parts(net: object, loss_fn: object, optimizer: object) -> None:
    """Raise unless these can be the parts of a Model.

    Raises:
        ConfigError: Names the one that is of another kind.
    """
    if isinstance(net, type):
        raise ConfigError(f"Model takes a net first, found the class {net.__name__}. Make one: {net.__name__}().")
    if not isinstance(net, nn.Module):
        raise ConfigError(f"Model takes a torch.nn.Module first, found {type(net).__name__}.")
    if loss_fn is not None:
        check_loss(loss_fn)
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        description = f"the class {optimizer.__name__}" if isinstance(optimizer, type) else type(optimizer).__name__
        raise ConfigError(
            f"Model takes a torch optimizer, found {description}. Make one: torch.optim.SGD(net.parameters(), lr=0.1)."
        )
    if optimizer is not None:
        check_trains(net, optimizer)


def check_epochs(epoch: object) -> None:
    """Raise unless this is a number of passes over the data.

    Raises:
        ConfigError: Says what was found.
    """
    if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 1:
        raise ConfigError(
            "Model.train takes a number of passes over the data first, found "
            f"{epoch if isinstance(epoch, int | float | str) else type(epoch).__name__}. Give 1 or more."
        )


def one_pass(data: Any) -> Any:
    """Return data of which an epoch is one pass: a pipeline without its `repeat`."""
    shortened = getattr(data, "one_pass", None)
    return data if shortened is None else shortened()


def training_loader(data: Any, options: dict[str, Any], words: Iterable[str] = ()) -> ShardedLoader:
    """Return the loader over the data, once all ranks agree on it. Collective.

    Args:
        data: Anything `ShardedLoader` takes.
        options: Those of `px.distribute`.
        words: The arguments of `Model.train`, for one of these that was misspelt.

    Raises:
        ConfigError: If it cannot load; on all ranks.
    """
    for name in options.keys() - inspect.signature(ShardedLoader).parameters.keys():
        if hint := did_you_mean(name, words):
            raise ConfigError(f"Model.train has no argument {name!r}.{hint}")
    global_batch = options.pop("global_batch", None)
    loader = agreed_loader(one_pass(data), global_batch, options)
    assert loader is not None
    assembly.loader = loader
    return loader


def distribute_net(
    net: nn.Module,
    current: Context,
    mode: ParallelMode | None,
    strategy: DistributedStrategy | None,
    plan: Plan | None,
    compiled: bool | None,
    search: Callable[[DistributedStrategy, Context], Plan] | None,
    look: Callable[[Plan], None] | None,
) -> None:
    """Distribute a net, unless it is distributed already. Collective.

    Args:
        net: A module.
        current: This process.
        mode: The mode; what ranks and strategy say when None.
        strategy: The user's.
        plan: The user's, instead of a strategy.
        compiled: Whether it is compiled; as the strategy says when None.
        search: Finds the Plan in AUTO_PARALLEL; None where nothing is trained.
        look: Lets data be those of the step that a Plan of the user's is of; None where nothing is trained.

    Raises:
        ConfigError: If it is distributed already and something else was asked for, or mode, strategy, Plan and
            `set_auto_parallel_context` contradict each other.
    """
    if applied_to(net) is not None:
        if strategy is not None or plan is not None:
            raise ConfigError(
                "Model was given a net that is distributed already, and a strategy or plan for it. Give these to the "
                "call that distributes it."
            )
        return
    plan = _users_plan(plan, strategy)
    if plan is None:
        chosen = strategy_of(mode, strategy, net, compiled)
        require_cuts(mode, chosen, net, current.world_size)
        use_strategy(chosen)
        if mode is ParallelMode.AUTO_PARALLEL and search is not None and current.world_size > 1:
            plan = search(chosen, current)
    elif look is not None:
        look(plan)
    add_model(net, plan)
    applied = applied_to(net)
    if auto_context.strategy_ckpt_save_file is not None and current.rank == 0 and applied is not None:
        save_plan(applied.plan, auto_context.strategy_ckpt_save_file)


def strategy_of(
    mode: ParallelMode | None, strategy: DistributedStrategy | None, net: nn.Module, compiled: bool | None
) -> DistributedStrategy:
    """Return the strategy that a Model trains its net with; see `distribute_net`.

    Raises:
        ConfigError: If strategy and `set_auto_parallel_context` contradict each other.
    """
    chosen = strategy_in(mode, strategy or assembly.initial, net)
    if compiled is not None:
        chosen.graph = compiled
    return chosen


def _users_plan(plan: Plan | None, strategy: DistributedStrategy | None) -> Plan | None:
    """Return the Plan that was handed over, or that of the file which was named instead; None if there is none."""
    read_file = auto_context.strategy_ckpt_load_file
    if read_file is not None:
        if plan is not None or strategy is not None:
            raise ConfigError(
                f"set_auto_parallel_context says strategy_ckpt_load_file={str(read_file)!r}, and Model was given "
                "another strategy or plan. Say one of them."
            )
        plan = load_plan(read_file)
    if plan is not None and auto_context.applied_to(DistributedStrategy()) != DistributedStrategy():
        raise ConfigError(
            "set_auto_parallel_context says how gradients or parameters are handled, and so does the Plan. Leave these "
            "settings out of it."
        )
    return plan


def distribute_optimizer(optimizer: Optimizer, loader: ShardedLoader) -> None:
    """Distribute an optimizer, unless it is distributed already, and say what the ranks train with. Collective."""
    if optimizer not in assembly.optimizers:
        add_optimizer(optimizer)
        announce(optimizer, loader)
