"""`replace_update`, `has_updated`: replace an optimizer's update rule or closure, and tell whether its step updated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from phalanx.parallel.session import Closure, session
from phalanx.parallel.step.hooks import replace_step
from phalanx.parallel.step.torch_scaler import handles_scale, refuse_scaler


def wrap_closures(optimizer: Optimizer, wrap: Callable[[Closure], Closure]) -> None:
    """Let an optimizer see what `wrap` makes of the closures that its `step` is given."""
    replace_step(optimizer).wrap_closure = wrap


def refuse_torch_scaler(optimizer: Optimizer, why: str) -> None:
    """Let a step of an optimizer be an error if torch's GradScaler takes it; `why` is a sentence without its end."""
    replace_step(optimizer)
    refuse_scaler(optimizer, why)


def follow_torch_scaler(optimizer: Optimizer) -> None:
    """Let what acts around an optimizer's steps see true gradients, and no step that torch's GradScaler leaves out."""
    if handles_scale(optimizer):
        replace_step(optimizer)


def replace_update(optimizer: Optimizer, update: Callable[[Optimizer], None]) -> None:
    """Let `update` change the parameters instead of torch's own rule; hooks run around it as around torch's.

    Args:
        optimizer: Any torch optimizer.
        update: Called without gradients.
    """

    def step(self: Optimizer, closure: Callable[[], float] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            update(self)
        return loss

    record = replace_step(optimizer)
    record.update, record.is_own_rule = Optimizer.profile_hook_step(step), True


def keep_update_out_of_graph(optimizer: Optimizer) -> None:
    """Keep a rule of ours outside the graph when `step` is compiled: it loops over parameters, and communicates."""
    record = session.optimizers.get(optimizer)
    if record is not None and record.is_own_rule:
        record.update = torch.compiler.disable(record.update)


def has_updated(optimizer: Optimizer) -> bool:
    """Return whether the last `optimizer.step()` changed the parameters.

    It does not at each batch under gradient accumulation, for a rank that holds several logical replicas, or where
    float16 training skips an overflow. True before the first step, and when nothing holds steps back.

    Args:
        optimizer: Any torch optimizer, distributed or not.
    """
    record = session.optimizers.get(optimizer)
    return record is None or record.has_updated


def follow_updates(scheduler: LRScheduler) -> LRScheduler:
    """Make a scheduler count updates: after an `optimizer.step()` that held its update back, its step does nothing.

    Needed for a scheduler that is stepped at every iteration, under gradient accumulation or float16 loss scaling.

    Args:
        scheduler: Any torch scheduler, of a distributed optimizer.

    Returns:
        The same scheduler.
    """
    optimizer, kind = scheduler.optimizer, type(scheduler)

    def step_after_update(scheduler: LRScheduler, *args: Any, **kwargs: Any) -> None:
        if has_updated(optimizer):
            kind.step(scheduler, *args, **kwargs)

    # A class, for what is set on the object would be in its state_dict.
    scheduler.__class__ = type(kind.__name__, (kind,), {"step": step_after_update})
    return scheduler
