"""`guard_losses`: let the cross entropy of a script's own loop be computed where memory runs out in it.

What a script does between forward and backward pass cannot be repeated, but one operator can. The activations of the
model, which fill the memory then, are let go of; `backward` meets the gap, and computes the forward pass again.

    F.cross_entropy(model(x), y)   out of memory: remedy, let go of the graph of the model, the same operator again
    loss.backward()                gradients arrive at the outputs, the graph is gone: as if memory had run out there
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from phalanx.parallel.memory.failures import MemoryFailure, is_repeatable
from phalanx.parallel.memory.guard.guard import running
from phalanx.parallel.memory.guard.guarded_backward import guarded_parameters
from phalanx.parallel.memory.guard.loss_point import follow_loss
from phalanx.parallel.memory.guard.repetition import GuardedGraph


@cache
def guard_losses(device_type: str) -> torch.library.Library:
    """Let cross entropies on a type of device be computed again, in this process from now on.

    The operator is replaced, not its function in Python: scripts and libraries compare functions, and pickle them.
    """
    library = torch.library.Library("aten", "IMPL")
    library.impl("cross_entropy_loss", _cross_entropy, f"Autograd{device_type.upper()}")
    return library


def _cross_entropy(*inputs: Any, **named: Any) -> Tensor:
    compute: Callable[[], Tensor] = partial(torch.ops.aten.cross_entropy_loss.default.decompose, *inputs, **named)
    if running.is_forward or running.is_backward or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return compute()
    handled, started = sys.exception(), time.perf_counter()
    try:
        loss = compute()
    except (RuntimeError, MemoryError) as error:
        if not is_repeatable(error):
            raise
        graph = GuardedGraph.of((inputs, named))
        why = graph.why_not_again(guarded_parameters())
        if why is not None:
            if graph.passes:
                error.add_note(f"The loss was not computed with less memory: {why}.")
            raise
        failure = MemoryFailure.of(error, "loss", graph.passes[0].guard.device, handled)
    else:
        follow_loss(loss, inputs[0])
        return loss
    loss = _compute_with_less(compute, graph, failure, started, handled)
    follow_loss(loss, inputs[0])
    return loss


def _compute_with_less(
    compute: Callable[[], Tensor],
    graph: GuardedGraph,
    failure: MemoryFailure,
    started: float,
    handled: BaseException | None,
) -> Tensor:
    while True:
        graph.make_room(failure, time.perf_counter() - started)
        try:
            return compute()
        except (RuntimeError, MemoryError) as error:
            if graph.is_released or not is_repeatable(error):
                raise
            failure = MemoryFailure.of(error, "loss", graph.passes[0].guard.device, handled)
