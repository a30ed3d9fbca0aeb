"""Run something around every `optimizer.step()`, eager or compiled."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

StepHook = Callable[[Optimizer], None]


@dataclass(slots=True)
class _Hooks:
    """What runs around the steps of one optimizer, and torch's handles of it."""

    before: list[StepHook] = field(default_factory=list)
    after: list[StepHook] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)

    def attach(self, optimizer: Optimizer, wrap: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = [
            optimizer.register_step_pre_hook(wrap(_caller(self.before))),
            optimizer.register_step_post_hook(wrap(_caller(self.after))),
        ]


_hooks: weakref.WeakKeyDictionary[Optimizer, _Hooks] = weakref.WeakKeyDictionary()


def hook_steps(optimizer: Optimizer, *, before: StepHook | None = None, after: StepHook | None = None) -> None:
    """Call `before` and `after` around every step of an optimizer, in the order in which they were given.

    Args:
        optimizer: Any torch optimizer.
        before: Called before the update; an error it raises stops the step.
        after: Called after it.
    """
    hooks = _hooks.get(optimizer)
    if hooks is None:
        hooks = _hooks[optimizer] = _Hooks()
        hooks.attach(optimizer, lambda hook: hook)
    hooks.before += [before] if before else []
    hooks.after += [after] if after else []


def keep_out_of_graph(optimizer: Optimizer) -> None:
    """Keep the hooks of an optimizer outside the graph when its step is compiled: they change the graph's inputs.

    (Marking them imports torch's compiler, which costs a second, so it is done only where a step is compiled.)
    """
    if optimizer in _hooks:
        _hooks[optimizer].attach(optimizer, torch.compiler.disable)


def _caller(hooks: list[StepHook]) -> Callable[..., None]:
    def call(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        for hook in hooks:
            hook(optimizer)

    return call
