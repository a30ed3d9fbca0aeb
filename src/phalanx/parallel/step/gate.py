"""Replace the update rule of one optimizer object, and let some calls of its `step` pass without an update.

Hooks around a step cannot do either, so the call itself is replaced on the one object; its class, hooks and schedulers
stay. Hooks run only around steps that update.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from phalanx.errors import ConfigError
from phalanx.parallel.step.torch_scaler import admit_scaled, handles_scale, refuse_scaler

Gate = Callable[[Optimizer], bool]
Closure = Callable[[], Any]


@dataclass(slots=True)
class _Step:
    """What `step` of one optimizer does."""

    update: Callable[..., Any]
    gates: list[Gate] = field(default_factory=list)
    is_ours: bool = False
    """Whether `update` is a rule of ours."""

    has_updated: bool = True
    """Whether the last call updated."""


_steps: weakref.WeakKeyDictionary[Optimizer, _Step] = weakref.WeakKeyDictionary()


def gate_steps(optimizer: Optimizer, gate: Gate, *, first: bool = False) -> None:
    """Ask `gate` at every `optimizer.step()` whether to update; gates are asked in turn until one says no.

    Args:
        optimizer: Any torch optimizer. Its `step` then takes no closure.
        gate: Called with the optimizer, before its hooks.
        first: Whether it is asked before the gates that are there.
    """
    gates = _step_of(optimizer).gates
    gates.insert(0 if first else len(gates), gate)


def wrap_closures(optimizer: Optimizer, wrap: Callable[[Closure], Closure]) -> None:
    """Let an optimizer see what `wrap` makes of the closures that its `step` is given."""
    made = _step_of(optimizer)
    inner = made.update

    def update(self: Optimizer, closure: Closure | None) -> Any:
        return inner(self, None if closure is None else wrap(closure))

    made.update = update


def refuse_torch_scaler(optimizer: Optimizer, why: str) -> None:
    """Let a step of an optimizer be an error if torch's GradScaler takes it; `why` is a sentence without its end."""
    _step_of(optimizer)
    refuse_scaler(optimizer, why)


def follow_torch_scaler(optimizer: Optimizer) -> None:
    """Let what acts around an optimizer's steps see true gradients, and no step that torch's GradScaler leaves out."""
    if handles_scale(optimizer):
        _step_of(optimizer)


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

    made = _step_of(optimizer)
    made.update, made.is_ours = Optimizer.profile_hook_step(step), True


def keep_update_out_of_graph(optimizer: Optimizer) -> None:
    """Keep a rule of ours outside the graph when `step` is compiled: it loops over parameters, and communicates."""
    made = _steps.get(optimizer)
    if made is not None and made.is_ours:
        made.update = torch.compiler.disable(made.update)


def has_updated(optimizer: Optimizer) -> bool:
    """Return whether the last `optimizer.step()` updated; True when nothing holds its steps back."""
    made = _steps.get(optimizer)
    return made is None or made.has_updated


def follow_updates(scheduler: LRScheduler) -> LRScheduler:
    """Make a scheduler count updates: after an `optimizer.step()` that held its update back, its step does nothing.

    Needed for a scheduler that is stepped at every iteration, under gradient merging or float16 loss scaling.

    Args:
        scheduler: Any torch scheduler, of a distributed optimizer.

    Returns:
        The same scheduler.
    """
    optimizer, step = scheduler.optimizer, type(scheduler).step

    def step_after_update(scheduler: LRScheduler, *args: Any, **kwargs: Any) -> None:
        if has_updated(optimizer):
            step(scheduler, *args, **kwargs)

    scheduler.step = MethodType(step_after_update, scheduler)  # type: ignore[method-assign]
    return scheduler


def _step_of(optimizer: Optimizer) -> _Step:
    made = _steps.get(optimizer)
    if made is not None:
        return made
    found = optimizer.step
    # Unbound, so that nothing here keeps the optimizer alive; a scheduler's own wrapper is unbound already.
    made = _steps[optimizer] = _Step(getattr(found, "__func__", None) or _ignoring_self(found))

    @wraps(made.update)  # keeps the mark by which torch's schedulers know their wrapper
    def step(self: Optimizer, closure: Callable[[], float] | None = None) -> Any:
        if closure is not None and made.gates:
            raise ConfigError(
                "optimizer.step(closure) was called, and a setting (gradient_merge, or amp with float16) may hold its "
                "update back, which a closure cannot know. Call backward() yourself, then step()."
            )
        made.has_updated = admit_scaled(self) and all(gate(self) for gate in made.gates)
        if not made.has_updated:
            return None
        self._opt_called = True  # type: ignore[attr-defined]  # what torch's schedulers ask for
        return made.update(self, closure)

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    return made


def _ignoring_self(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def step(_: Optimizer, closure: Callable[[], float] | None) -> Any:
        return call(closure)

    return step
