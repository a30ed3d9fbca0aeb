"""`watch_steps`: warn when the launched ranks train separately, because the script never joins them to one job.

Nothing in such a script need be ours, so a hook that torch offers looks at the first steps of its optimizers.
"""

from __future__ import annotations

import gc
import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from phalanx.comm.local.call_count import calls_issued
from phalanx.parallel.session import is_anything_distributed

logger = logging.getLogger("phalanx.launch")

PATIENCE = 3
"""Steps before a look: a script may try its model before it joins the others."""


def watch_steps(world_size: int) -> None:
    """Warn once, at the third optimizer step of this process, if it trains as if it were alone.

    A script that exchanges anything from its first to its third step, by collectives of its own, knows what it does.

    Args:
        world_size: Ranks of the job, at least 2.
    """
    steps = calls_at_first = 0

    def look(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        nonlocal steps, calls_at_first
        # A compiler that traces the step must not see the counter.
        if steps >= PATIENCE or torch.compiler.is_compiling():
            return
        steps += 1
        if steps == 1:
            calls_at_first = calls_issued()
        elif steps == PATIENCE and calls_issued() == calls_at_first and (what := _missing(optimizer)):
            logger.warning(
                "the %d ranks train side by side, each a model of its own: %s. Call model, optimizer, loader = "
                "px.distribute(model, optimizer, data), or start one process with -n 1.",
                world_size,
                what,
            )

    register_optimizer_step_post_hook(look)


def _missing(optimizer: Optimizer) -> str:
    """Return what was not done that would join the ranks, empty if something was."""
    if not dist.is_initialized():
        return "the script never joins them"
    # Not sooner: a script without phalanx need not pay for its import before it trains.
    from phalanx.comm.context import is_initialized

    if not is_initialized():
        return ""  # a group the script made itself: it knows torch.distributed
    if is_anything_distributed():
        return ""
    if _is_wrapped(optimizer):
        return ""
    return "it calls init, but gives no model to be distributed, so gradients are not averaged"


def _is_wrapped(optimizer: Optimizer) -> bool:
    """Return whether torch keeps the ranks together itself: by a wrapper (DDP, FSDP), or DTensors as parameters."""
    plain = {nn.Parameter, torch.Tensor}
    if any(type(p) not in plain for group in optimizer.param_groups for p in group["params"]):
        return True
    kinds = {type(item) for item in gc.get_objects()}
    return any(
        issubclass(kind, nn.Module) and kind.__module__.startswith("torch.") and "Parallel" in kind.__name__
        for kind in kinds
    )
