"""Run something around every `optimizer.step()`, eager or compiled."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from phalanx.errors import ConfigError

StepHook = Callable[[Optimizer], None]


@dataclass(slots=True)
class _Hooks:
    """What runs around the steps of one optimizer, and torch's handles of it."""

    before: list[StepHook] = field(default_factory=list)
    after: list[StepHook] = field(default_factory=list)
    needs_gradients: bool = False
    handles: list[Any] = field(default_factory=list)

    def attach(self, optimizer: Optimizer, wrap: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = [
            optimizer.register_step_pre_hook(wrap(self._begin)),
            optimizer.register_step_post_hook(wrap(self._end)),
        ]

    def _begin(self, optimizer: Optimizer, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self.needs_gradients and (named.get("closure") or args[1:2] not in ((), (None,))):
            raise ConfigError(
                "optimizer.step(closure) was called, and a setting (clip, dgc, or amp in pure precision) acts on the "
                "gradients before the update, where a closure has not computed them. Call backward() yourself, then "
                "step()."
            )
        for hook in self.before:
            hook(optimizer)

    def _end(self, optimizer: Optimizer, _args: object, _named: object) -> None:
        for hook in self.after:
            hook(optimizer)


_hooks: weakref.WeakKeyDictionary[Optimizer, _Hooks] = weakref.WeakKeyDictionary()


def hook_steps(
    optimizer: Optimizer, *, before: StepHook | None = None, after: StepHook | None = None, on_gradients: bool = False
) -> None:
    """Call `before` and `after` around every step of an optimizer, in the order in which they were given.

    Args:
        optimizer: Any torch optimizer.
        before: Called before the update; an error it raises stops the step.
        after: Called after it.
        on_gradients: Whether `before` acts on gradients, so that `step` takes no closure from now on.
    """
    hooks = _hooks.get(optimizer)
    if hooks is None:
        hooks = _hooks[optimizer] = _Hooks()
        hooks.attach(optimizer, lambda hook: hook)
    hooks.needs_gradients |= on_gradients
    hooks.before += [before] if before else []
    hooks.after += [after] if after else []


def keep_out_of_graph(optimizer: Optimizer) -> None:
    """Keep the hooks of an optimizer outside the graph when its step is compiled: they change the graph's inputs.

    (Marking them imports torch's compiler, which costs a second, so it is done only where a step is compiled.)
    """
    if optimizer in _hooks:
        _hooks[optimizer].attach(optimizer, torch.compiler.disable)
