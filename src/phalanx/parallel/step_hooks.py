"""Run something around every `optimizer.step()`, eager or compiled."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim import Optimizer

StepHook = Callable[[Optimizer], None]


def hook_steps(
    optimizer: Optimizer, *, before: StepHook | None = None, after: StepHook | None = None, compiled: bool
) -> None:
    """Call `before` and `after` around every step of an optimizer.

    Args:
        optimizer: Any torch optimizer.
        before: Called before the update; an error it raises stops the step.
        after: Called after it.
        compiled: Whether the update will be compiled. The hooks then stay outside its graph: they change what it takes
            as inputs. Marking them so imports the compiler, which costs a second: not done without need.
    """
    if before is not None:
        optimizer.register_step_pre_hook(_as_hook(before, compiled))
    if after is not None:
        optimizer.register_step_post_hook(_as_hook(after, compiled))


def _as_hook(function: StepHook, compiled: bool) -> Callable[..., None]:
    def hook(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        function(optimizer)

    return torch.compiler.disable(hook) if compiled else hook
