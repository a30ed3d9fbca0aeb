"""`check_trains`, `ForwardWatch`: errors and warnings for misuse: another model's optimizer, wrapped models."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.errors import ConfigError
from phalanx.parallel.checks.wrappers import explain_outer, outer_wrapper
from phalanx.parallel.session import (
    TrainingRequest,
    applied_to,
    distributed_optimizers,
    is_distributed_optimizer,
    session,
)
from phalanx.parallel.step.param_remap import successor
from phalanx.plan.value import Plan

logger = logging.getLogger("phalanx.parallel")

ACTS_AT_UPDATES = frozenset(("lars", "lamb", "clip", "ema", "gradient_merge", "localsgd", "adaptive_localsgd", "dgc"))
"""Techniques of a strategy that do nothing, or not all they should, to an optimizer that is not distributed."""


def warn_without_optimizer(model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Warn when a model came by `distributed_model`, but this optimizer, or any if None, by no such call."""
    record = session.models.get(model)
    if record is None or not record.expects_optimizer:
        return
    if not (distributed_optimizers() if optimizer is None else is_distributed_optimizer(optimizer)):
        on = sorted(ACTS_AT_UPDATES.intersection(session.strategy.techniques)) if session.strategy else []
        logger.warning(
            "the model is distributed but no optimizer is%s. Call fleet.distributed_optimizer(optimizer) too.",
            f", so {', '.join(on)} cannot act" if on else "",
        )


def is_trained_by(model: nn.Module, optimizer: Optimizer) -> bool:
    """Return whether an optimizer holds a parameter of a model, or one that was replaced there."""
    own = {id(param) for param in model.parameters()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return any(id(param) in own or id(successor(param)) in own for param in params)


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
    for model, record in session.models.items():
        watch, applied = record.forward_watch, record.applied
        if watch is None or watch.is_called or applied is None or applied.pipeline is not None:
            continue
        if not is_trained_by(model, optimizer):
            continue
        on = [name for name, acts in (("graph", applied.plan.step.compiled), ("amp", _is_cast(applied.plan))) if acts]
        if not on or torch._dynamo.utils.counters["frames"]["total"]:
            continue
        watch.is_called = True
        logger.warning(
            "%s has no effect: the gradients of this %s came without a call of the model, by another of its methods. "
            "Call the model, and let forward() choose the method%s.",
            " and ".join(on),
            type(model).__name__,
            ", or run the method under torch.autocast" if "amp" in on else "",
        )


def _is_cast(plan: Plan) -> bool:
    return any(rule.match == "" and rule.dtype is not None for rule in plan.modules)


def plan_at_first_call(model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
    """In a run that only plans, end a script at the first training call of a model whose data nobody handed over.

    A call without gradients trains nothing, in training mode too.
    """
    if session.planner is not None and model.training and torch.is_grad_enabled():
        optimizer = next((o for o in distributed_optimizers() if is_trained_by(model, o)), None)
        session.planner(
            TrainingRequest(model=model, optimizer=optimizer, strategy=session.strategy, inputs=(inputs, named))
        )


class ForwardWatch:
    """Warns once about loops nobody means: evaluation that keeps graphs, training without a distributed optimizer."""

    PATIENCE = 3
    """Forward passes before a warning; the first may be a probe."""

    def __init__(self, watch_samples: Callable[[tuple[Any, ...]], None]) -> None:
        self.evaluations = 0
        self.training_steps = 0
        self.is_called = False
        """Whether the model was called, but for calls of compiled code."""

        self._watch_samples = watch_samples

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
            self._watch_samples((*inputs, *named.values()))
            if self.training_steps == self.PATIENCE:
                warn_without_optimizer(model)
            return
        self.evaluations += 1
        if self.evaluations == self.PATIENCE:
            logger.warning(
                "the model is in eval() mode but still builds a graph for backward, which keeps memory. "
                "Wrap evaluation in torch.no_grad(), or use phalanx.evaluate."
            )
