"""Let some calls of `optimizer.step()` pass without an update, and say which did update.

Hooks around a step cannot hold it back, so the call itself is replaced on the one optimizer object; its class, hooks
and schedulers stay. Hooks run only around steps that update.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from types import MethodType
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from phalanx.errors import ConfigError

Gate = Callable[[Optimizer], bool]


@dataclass(slots=True)
class _Gated:
    """What stands before the steps of one optimizer."""

    gates: list[Gate] = field(default_factory=list)
    has_updated: bool = True
    """Whether the last call updated."""


_gated: weakref.WeakKeyDictionary[Optimizer, _Gated] = weakref.WeakKeyDictionary()


def gate_steps(optimizer: Optimizer, gate: Gate, *, first: bool = False) -> None:
    """Ask `gate` at every `optimizer.step()` whether to update; gates are asked in turn until one says no.

    Args:
        optimizer: Any torch optimizer. Its `step` then takes no closure.
        gate: Called with the optimizer, before its hooks.
        first: Whether it is asked before the gates that are there.
    """
    gated = _gated.get(optimizer)
    if gated is None:
        gated = _gated[optimizer] = _Gated()
        _stand_before(optimizer, gated)
    gated.gates.insert(0 if first else len(gated.gates), gate)


def has_updated(optimizer: Optimizer) -> bool:
    """Return whether the last `optimizer.step()` updated; True when nothing holds its steps back."""
    gated = _gated.get(optimizer)
    return gated is None or gated.has_updated


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


def _stand_before(optimizer: Optimizer, gated: _Gated) -> None:
    found = optimizer.step
    # Unbound, so that nothing here keeps the optimizer alive; a scheduler's own wrapper is unbound already.
    inner: Callable[..., Any] = getattr(found, "__func__", None) or _ignoring_self(found)

    @wraps(inner)  # keeps the mark by which torch's schedulers know their wrapper
    def step(self: Optimizer, closure: Callable[[], float] | None = None) -> Any:
        if closure is not None:
            raise ConfigError(
                "optimizer.step(closure) was called, and a setting (gradient_merge, or amp with float16) may hold its "
                "update back, which a closure cannot know. Call backward() yourself, then step()."
            )
        gated.has_updated = all(gate(self) for gate in gated.gates)
        return inner(self) if gated.has_updated else None

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]


def _ignoring_self(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def step(_: Optimizer) -> Any:
        return call()

    return step
