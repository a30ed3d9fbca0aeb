"""`guard_memory`: let a distributed model repeat passes that run out of memory, where that can be done exactly."""

from __future__ import annotations

import logging
import weakref
from functools import partial
from typing import Any

from torch import nn

from phalanx.comm.context import Context
from phalanx.parallel.memory.free_memory import block_return
from phalanx.parallel.memory.guard.guard import MemoryGuard, Sharding
from phalanx.parallel.memory.guard.guarded_backward import guard_backward
from phalanx.parallel.memory.guard.guarded_loss import guard_losses
from phalanx.parallel.memory.guard.remedies import Remedies
from phalanx.parallel.session import Applied, model_record
from phalanx.plan.rules.collective_pass import why_not_alone
from phalanx.plan.value import Plan

logger = logging.getLogger("phalanx.parallel")


def guard_memory(model: nn.Module, applied: Applied, context: Context) -> None:
    """Guard a model against running out of memory. Models that this cannot do are left as they are, which is logged.

    Args:
        model: The model, distributed.
        applied: What was made of it.
        context: Tells the device.
    """
    why = why_unguarded(model, applied.plan, context)
    if why is not None:
        logger.info("a pass of %s that runs out of memory is not repeated: %s", type(model).__name__, why)
        return
    sharding = None
    if applied.is_sharded:
        from phalanx.parallel.zero import interrupted  # a job that shards nothing does not wait for this

        sharding = Sharding(interrupted.reset_passes, interrupted.is_all_gathered)
    guard = MemoryGuard(model, Remedies(model, applied.plan.modules, context.device), context.device, sharding, _begin)
    # Torch calls this in the place of the forward pass with its hooks, copies and pickles leave it out, and it can
    # hold the model weakly: unlike a wrapped forward it makes no ring.
    model._compiled_call_impl = partial(_call, weakref.ref(model), guard)
    model_record(model).memory_guard = guard


def _begin(guard: MemoryGuard) -> None:
    """Guard what follows the first pass, too."""
    guard_backward(guard)
    guard_losses(guard.device.type)
    # In the heap, small blocks that stay lie between large ones that are freed, and none that is larger fits there.
    block_return.begin(guard.device)


def why_unguarded(model: nn.Module, plan: Plan, context: Context) -> str | None:
    """Return why a rank cannot repeat a forward pass of a model alone, without changing a result; None if it can."""
    if plan.step.compiled or model._compiled_call_impl is not None:
        return "its step is compiled"
    return why_not_alone(plan, has_servers=bool(context.role.server_endpoints))


def _call(model: weakref.ref[nn.Module], guard: MemoryGuard, *inputs: Any, **named: Any) -> Any:
    module = model()
    assert module is not None
    if not guard.can_run():
        return module._call_impl(*inputs, **named)
    return guard.run(partial(_call_again, model, inputs, named), (inputs, named) if named else inputs)


def _call_again(model: weakref.ref[nn.Module], inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
    module = model()
    assert module is not None
    return module._call_impl(*inputs, **named)
