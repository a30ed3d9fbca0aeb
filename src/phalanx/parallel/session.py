"""What this process has handed over, and eyes on the forward passes of loops nobody means."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.data.loader.loader import ShardedLoader
from phalanx.errors import ConfigError
from phalanx.parallel.apply import applied, applied_to
from phalanx.parallel.checks.wrappers import explain_outer, outer_wrapper
from phalanx.parallel.step.param_remap import replaced
from phalanx.plan.value import Plan
from phalanx.strategy import DistributedStrategy

logger = logging.getLogger("phalanx.parallel")


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What a script is about to train."""

    model: nn.Module
    optimizer: Optimizer | None = None
    strategy: DistributedStrategy | None = None
    loss_fn: Callable[[Any, Any], Tensor] | None = None
    has_target: bool | None = None
    """Whether a column of the data is its target; None where a loop of the script's own decides."""

    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    """What it called the model with, where nobody handed over the data."""


@dataclass(slots=True)
class Assembly:
    """What has been handed over so far in this process; Fleet's verbs bring the pieces one by one, in any order."""

    strategy: DistributedStrategy | None = None
    initial: DistributedStrategy | None = None
    """What `fleet.init` was given: that of models for which nobody says another."""

    optimizers: weakref.WeakSet[Optimizer] = field(default_factory=weakref.WeakSet)
    incomplete: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    """Models whose optimizer should come by a call of its own."""

    forwards: weakref.WeakKeyDictionary[nn.Module, ForwardWatch] = field(default_factory=weakref.WeakKeyDictionary)
    """What looks at the forward passes of each distributed model."""

    loader: ShardedLoader | None = None
    planner: Callable[[Training], NoReturn] | None = None
    """In a run that only plans, called in place of training."""

    has_compared: bool = False
    has_named_old_words: bool = False


ACTS_AT_UPDATES = frozenset(("lars", "lamb", "clip", "ema", "gradient_merge", "localsgd", "adaptive_localsgd", "dgc"))
"""Techniques of a strategy that do nothing, or not all they should, to an optimizer that was never handed over."""

assembly = Assembly()
"""This process's own."""


def is_anything_handed_over() -> bool:
    """Return whether this process distributed a model or an optimizer."""
    return bool(applied() or assembly.optimizers)


def warn_if_apart(model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Warn when a model came by `distributed_model`, but this optimizer, or any if None, by no such call."""
    optimizers = assembly.optimizers
    if model in assembly.incomplete and not (optimizers if optimizer is None else optimizer in optimizers):
        on = sorted(ACTS_AT_UPDATES.intersection(assembly.strategy.techniques)) if assembly.strategy else []
        logger.warning(
            "the model is distributed but no optimizer is%s. Call fleet.distributed_optimizer(optimizer) too.",
            f", so {', '.join(on)} cannot act" if on else "",
        )


def is_trained_by(model: nn.Module, optimizer: Optimizer) -> bool:
    """Return whether an optimizer holds a parameter of a model, or one that was replaced there."""
    own = {id(param) for param in model.parameters()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return any(id(param) in own or id(replaced.successor(param)) in own for param in params)


def check_trains(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise unless an optimizer holds a parameter of a model.

    Raises:
        ConfigError: If the two do not belong together.
    """
    if not is_trained_by(model, optimizer):
        raise ConfigError(
            f"the optimizer holds no parameter of the {type(model).__name__}, so nothing would be trained. Make it of "
            "the model's parameters(), of this very object, which a copy is not."
        )


def refuse_outer_wrapper(model: nn.Module, _inputs: tuple[Any, ...]) -> None:
    """Stop the forward pass of a distributed model through a wrapper that was put around it; a forward pre-hook.

    Raises:
        ConfigError: Names the wrapper.
    """
    kind = outer_wrapper(model)
    if kind is not None and (applied_to(model) is not None or kind == "DataParallel"):
        raise ConfigError(explain_outer(kind))


def warn_if_never_called(optimizer: Optimizer) -> None:
    """Warn when a model got gradients by other methods than its forward pass, the only one on which some settings act.

    Of compiled code only that there is some is known.
    """
    for model, watch in assembly.forwards.items():
        made = applied_to(model)
        if watch.is_called or made is None or made.pipeline is not None or not is_trained_by(model, optimizer):
            continue
        on = [name for name, acts in (("graph", made.plan.step.compiled), ("amp", _is_cast(made.plan))) if acts]
        if not on or torch._dynamo.utils.counters["frames"]["total"]:
            continue
        watch.is_called = True
        logger.warning(
            "%s does not act: the gradients of this %s came without a call of the model, by another of its methods. "
            "Call the model, and let forward() choose the method%s.",
            " and ".join(on),
            type(model).__name__,
            ", or run the method under torch.autocast" if "amp" in on else "",
        )


def _is_cast(plan: Plan) -> bool:
    return any(rule.match == "" and rule.dtype is not None for rule in plan.modules)


def reach_at_call(model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
    """In a run that only plans, end a script at the first training call of a model whose data nobody handed over.

    A call without gradients trains nothing, in training mode too.
    """
    if assembly.planner is not None and model.training and torch.is_grad_enabled():
        optimizer = next((one for one in assembly.optimizers if is_trained_by(model, one)), None)
        training = Training(model=model, optimizer=optimizer, strategy=assembly.strategy, inputs=(inputs, named))
        assembly.planner(training)


class ForwardWatch:
    """Warns once about loops nobody means: evaluation that keeps graphs, training without a distributed optimizer."""

    PATIENCE = 3
    """Forward passes before a warning; the first may be a probe."""

    def __init__(self, watch_rows: Callable[[tuple[Any, ...]], None]) -> None:
        self.evaluations = 0
        self.training_steps = 0
        self.is_called = False
        """Whether the model was called, but for calls of compiled code."""

        self._watch_rows = watch_rows

    def __call__(self, model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        """Count a forward pass."""
        # A compiler that traces the model must not see the counters: it would compile anew for each value.
        if torch.compiler.is_compiling():
            return
        self.is_called = True
        if not isinstance(output, Tensor) or not output.requires_grad:
            return
        if model.training:
            self.training_steps += 1
            self._watch_rows((*inputs, *named.values()))
            if self.training_steps == self.PATIENCE:
                warn_if_apart(model)
            return
        self.evaluations += 1
        if self.evaluations == self.PATIENCE:
            logger.warning(
                "the model is in eval() mode but still builds a graph for backward, which keeps memory. "
                "Wrap evaluation in torch.no_grad(), or use phalanx.evaluate."
            )
