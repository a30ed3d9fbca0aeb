"""`ModelSetup`: distribute a `Model`'s net and optimizer at first use, in its mode."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from phalanx.comm import context
from phalanx.data.loader.binding import LossFunction
from phalanx.data.loader.loader import ShardedLoader
from phalanx.errors import ConfigError, did_you_mean
from phalanx.parallel.checks.misuse import check_trains
from phalanx.parallel.distribute import add_model, add_optimizer, agreed_loader, announce, join, use_strategy
from phalanx.parallel.session import TrainingRequest, applied_to, is_distributed_optimizer, session
from phalanx.plan.files import load_plan, save_plan
from phalanx.plan.value import Plan
from phalanx.strategy import DistributedStrategy
from phalanx.train.loss.batch_reader import check_loss
from phalanx.train.model.auto_context import auto_context
from phalanx.train.model.mode_rules import check_ranks, require_cuts, strategy_in
from phalanx.train.model.modes import ParallelMode
from phalanx.train.model.planning import prepare_for_plan, replicate_net, search_plan


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
    session.loader = loader
    return loader


class ModelSetup:
    """Distributes a Model's net and optimizer when they are first used, with the Plan of the user or of the planner.

    Args:
        net: A module, distributed already or not.
        loss_fn: Takes the net's output and the target; None for a net that returns its loss.
        optimizer: What trains it, if it is trained.
        mode: The mode; as the ranks and the strategy say when None.
        strategy: The user's.
        plan: The user's, instead of a strategy.
        compiled: Whether steps are compiled; as the strategy says when None.
    """

    def __init__(
        self,
        net: nn.Module,
        loss_fn: LossFunction | None,
        optimizer: Optimizer | None,
        *,
        mode: ParallelMode | None,
        strategy: DistributedStrategy | None,
        plan: Plan | None,
        compiled: bool | None,
    ) -> None:
        self._net, self._loss_fn, self._optimizer = net, loss_fn, optimizer
        self._mode, self._strategy, self._plan, self._compiled = mode, strategy, plan, compiled
        self._is_distributed = False
        self._keeps_global_batch = False
        """Whether a size per rank means the same global batch in every `train`, as there is or will be a Plan."""

        self._is_replicated = False
        """Whether all ranks hold the full net, as its Plan waits for the first batch of `train`."""

    def join(self, verb: str) -> context.Context:
        """Join the ranks, and check that the mode fits them. Collective."""
        current = join(verb)
        check_ranks(self._mode, current.role)
        return current

    def loader(self, data: Any, options: dict[str, Any], words: Iterable[str]) -> ShardedLoader:
        """Return the loader over training data; with a Plan its global batches are those of all ranks. Collective."""
        loader = training_loader(data, options, words)
        if self._keeps_global_batch:
            loader.keep_global_batch(context.current().world_size)
        return loader

    @property
    def compiles(self) -> bool:
        """Whether steps of the distributed net are compiled."""
        applied = applied_to(self._net)
        assert applied is not None
        return applied.plan.step.compiled if self._compiled is None else self._compiled

    def distribute(self, loader: ShardedLoader | None = None) -> None:
        """Distribute the net, unless it is distributed already. Collective.

        Without training data a net that AUTO_PARALLEL will plan is only replicated.

        Args:
            loader: The training data; None where nothing is trained.

        Raises:
            ConfigError: If it is distributed already and something else was requested, or mode, strategy, Plan and
                `set_auto_parallel_context` contradict each other.
        """
        if session.planner is not None and loader is not None:
            session.planner(
                TrainingRequest(
                    model=self._net,
                    optimizer=self._optimizer,
                    strategy=self._chosen_strategy(),
                    loss_fn=self._loss_fn,
                    has_target=self._loss_fn is not None,
                    return_outputs=False,
                )
            )
        if self._is_distributed:
            return
        current = context.current()
        if loader is None and self._is_to_be_planned(current):
            if not self._is_replicated:
                replicate_net(self._net, current)
            self._is_replicated = True
            return
        self._keeps_global_batch = self._is_planned(current)
        self._apply(loader, current)
        self._is_distributed = True

    def _apply(self, loader: ShardedLoader | None, current: context.Context) -> None:
        if applied_to(self._net) is not None:
            if self._strategy is not None or self._plan is not None:
                raise ConfigError(
                    "Model was given a net that is distributed already, and a strategy or plan for it. Give these to "
                    "the call that distributes it."
                )
            return
        plan = self._find_plan(None if self._optimizer is None else loader, current)
        add_model(self._net, plan)
        applied = applied_to(self._net)
        if auto_context.strategy_ckpt_save_file is not None and current.rank == 0 and applied is not None:
            save_plan(applied.plan, auto_context.strategy_ckpt_save_file)

    def _find_plan(self, loader: ShardedLoader | None, current: context.Context) -> Plan | None:
        """Return the user's Plan, or the one that AUTO_PARALLEL searches; None if the strategy decides. Collective."""
        plan = _users_plan(self._plan, self._strategy)
        if plan is not None:
            if loader is not None:
                prepare_for_plan(self._net, loader, plan, has_target=self._loss_fn is not None)
            return plan
        strategy = self._chosen_strategy()
        require_cuts(self._mode, strategy, self._net, current.world_size)
        use_strategy(strategy)
        if self._mode is not ParallelMode.AUTO_PARALLEL or loader is None or current.world_size == 1:
            return None
        assert self._optimizer is not None
        return search_plan(self._net, self._loss_fn, self._optimizer, loader, strategy, current)

    def _chosen_strategy(self) -> DistributedStrategy:
        strategy = strategy_in(self._mode, self._strategy or session.initial_strategy, self._net)
        if self._compiled is not None:
            strategy.graph = self._compiled
        return strategy

    def _is_to_be_planned(self, current: context.Context) -> bool:
        """Return whether AUTO_PARALLEL will search the Plan of the net, once there is a batch of the training data."""
        return self._optimizer is not None and self._is_planned(current) and not self._has_plan()

    def _is_planned(self, current: context.Context) -> bool:
        """Return whether the net, not distributed yet, trains with a Plan of the user or of the planner."""
        is_auto = self._mode is ParallelMode.AUTO_PARALLEL and current.world_size > 1
        return (is_auto or self._has_plan()) and applied_to(self._net) is None

    def _has_plan(self) -> bool:
        return self._plan is not None or auto_context.strategy_ckpt_load_file is not None


def _users_plan(plan: Plan | None, strategy: DistributedStrategy | None) -> Plan | None:
    """Return the Plan that was passed, or that of the file which was named instead; None if there is none."""
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
    if not is_distributed_optimizer(optimizer):
        add_optimizer(optimizer)
        announce(optimizer, loader)
