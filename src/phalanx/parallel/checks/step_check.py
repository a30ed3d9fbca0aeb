"""`StepWatch`: refuse an optimizer step on gradients that were not reduced over all ranks."""

from __future__ import annotations

import logging
from functools import cache
from operator import is_

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

import phalanx.comm.context as context_of
from phalanx.errors import ConfigError
from phalanx.parallel.checks.misuse import warn_if_never_called
from phalanx.parallel.model_shape import is_handle, is_module_held
from phalanx.parallel.session import (
    Applied,
    is_any_named,
    is_distributed_optimizer,
    list_applied,
    optimizer_record,
    parameter_name,
    session,
)

logger = logging.getLogger("phalanx.parallel")


class StepWatch:
    """Looks at an optimizer before each of its updates.

    Args:
        is_handed_over: Whether it came by `px.distribute` or `fleet.distributed_optimizer`. Others may also train what
            is of no concern here.
    """

    def __init__(self, *, is_handed_over: bool = True) -> None:
        self._is_handed_over = is_handed_over
        self._has_looked = False
        self._models = 0
        self._params: list[Tensor] = []
        self._unmanaged: list[Tensor] = []

    def __call__(self, optimizer: Optimizer) -> None:
        """Check what the optimizer is about to do.

        Raises:
            ConfigError: If it trains nothing, or gradients that other ranks have no part in.
        """
        optimizer_record(optimizer).updates += 1
        models = list_applied()
        self._follow(optimizer, len(models))
        is_concerned = len(self._unmanaged) < len(self._params)
        if (
            models
            and not is_concerned
            and self._is_handed_over
            and not any(p.grad is not None for p in self._unmanaged)
        ):
            raise ConfigError(
                f"this {type(optimizer).__name__} holds no parameter of a distributed model, so its steps train "
                "nothing. Make it of the parameters of the module that is distributed, of that very object."
            )
        if is_concerned and not self._has_looked and any(p.grad is not None for p in self._params):
            self._has_looked = True
            warn_if_never_called(optimizer)
        if not context_of.current().is_distributed:
            return
        if is_concerned:
            self._check_not_in_backward(optimizer, models)
        late = [p for p in self._unmanaged if p.grad is not None]
        if late and (self._is_handed_over or is_concerned or is_any_named(late)):
            raise ConfigError(_explain_unmanaged(late) if models else _explain_no_model())

    def _follow(self, optimizer: Optimizer, models: int) -> None:
        """Look again at which parameters are taken care of, if there are others than before."""
        params = [p for group in optimizer.param_groups for p in group["params"]]
        before = self._params
        if models == self._models and len(params) == len(before) and all(map(is_, params, before)):
            return
        self._models, self._params = models, params
        self._unmanaged = [p for p in params if not is_managed(p)]

    def _check_not_in_backward(self, optimizer: Optimizer, models: list[Applied]) -> None:
        reducers = [applied.reducer for applied in models if applied.reducer is not None]
        if torch._C._current_graph_task_id() != -1 and any(reducer.has_gradients for reducer in reducers):
            raise ConfigError(
                f"{type(optimizer).__name__}.step() was called inside a backward pass, by a hook, before the gradients "
                "of all ranks came. Call step() after backward(); to keep gradients small, use strategy.sharding."
            )
        if any(reducer.is_reducing for reducer in reducers):
            raise ConfigError("the last backward pass raised an error, so the gradients are incomplete. End the job.")
        if isinstance(optimizer, LBFGS) and not self._is_handed_over:
            raise ConfigError(
                "LBFGS decides by the loss, which every rank has of its own rows only. Give the optimizer to "
                "px.distribute or fleet.distributed_optimizer: the loss is then that of all rows."
            )


@cache
def watch_every_optimizer() -> None:
    """Check the steps of optimizers that are not distributed too: they may hold parameters of distributed models."""
    register_optimizer_step_pre_hook(_check_foreign)


def _check_foreign(optimizer: Optimizer, _args: object, _named: object) -> None:
    if torch.compiler.is_compiling() or is_distributed_optimizer(optimizer) or not context_of.is_initialized():
        return
    if context_of.current().replicas is not None and list_applied():
        params = (param for group in optimizer.param_groups for param in group["params"])
        if any(param in session.parameters for param in params):
            raise ConfigError(
                "an optimizer that was not given to px.distribute trains a model with logical replicas: it would step "
                "for each of them. Give it to px.distribute with the model, or to fleet.distributed_optimizer."
            )
    if context_of.current().is_distributed and list_applied():
        record = optimizer_record(optimizer)
        record.watch = record.watch or StepWatch(is_handed_over=False)
        record.watch(optimizer)


def is_managed(param: Tensor) -> bool:
    """Return whether a distributed model, or an optimizer's table, takes care of this parameter's gradient."""
    if is_handle(param) or (session.is_in_table is not None and session.is_in_table(param)):
        return True
    _, is_trainable = session.parameters.get(param, (None, is_module_held(param)))
    return bool(is_trainable)


def _explain_no_model() -> str:
    return (
        "the optimizer is distributed but no model is, so gradients would not be averaged and each rank would train a "
        "model of its own. Call fleet.distributed_model(model) too, before training."
    )


def _explain_unmanaged(late: list[Tensor]) -> str:
    name = parameter_name(late[0])
    which = f"parameter {name!r}" if name else f"a parameter of shape {tuple(late[0].shape)}"
    others = f" (and those of {len(late) - 1} others)" if len(late) > 1 else ""
    why = (
        "It was frozen, or another tensor stood in its place, when the model was distributed: set requires_grad, "
        "exchange layers and load with assign=True before that"
        if name
        else "It belongs to no distributed model: distribute one module that holds all you train"
    )
    return f"the gradient of {which}{others} is not averaged over the ranks. {why}."
