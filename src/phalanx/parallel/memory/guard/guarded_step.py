"""`guard_step`: take the memory of an optimizer's step before it changes a parameter, so that it can be had first.

Optimizers allocate their state at the first step, one parameter after the other, and update in place: where memory runs
out in the middle, nobody can tell how far they came. So what the step is going to take is allocated, and freed, before.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from phalanx.accelerator import is_accelerator
from phalanx.errors import ConfigError
from phalanx.parallel.memory.estimate import state_of
from phalanx.parallel.memory.failures import MemoryFailure, is_repeatable
from phalanx.parallel.memory.free_memory import block_return, free_caches
from phalanx.parallel.memory.guard.remedies import FREE_CACHES, Remedy, report_remedy
from phalanx.parallel.session import StepPhase, optimizer_record
from phalanx.parallel.step.hooks import add_action
from phalanx.parallel.step.norms import local_part

_TEMPORARIES = 3
"""As large as a parameter, while it is updated: a gradient with weight decay, a root, a quotient."""

_SGD_TEMPORARIES = 2

_LOOP = Remedy(
    "for_loop", "updates its parameters one by one from now on", "foreach=False in the arguments of the optimizer"
)


def guard_step(optimizer: Optimizer, device: torch.device) -> None:
    """Let the memory of an optimizer's first step be found before it. Kinds whose state is not known are left alone."""
    try:
        state_of(optimizer)
    except ConfigError:
        return
    add_action(optimizer, StepPhase.RESERVE_MEMORY, MemoryReserve(device))


class MemoryReserve:
    """Takes, and gives back, what a step allocates; applies a remedy if that is not there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states: int | None = None
        """For how many parameters there was state when the last step began."""

        self._has_freed = False

    def __call__(self, optimizer: Optimizer) -> None:
        """Make sure of the memory of a step that has state to allocate."""
        if len(optimizer.state) == self._states or _updates_otherwise(optimizer):
            return
        self._states = len(optimizer.state)
        handled, started = sys.exception(), time.perf_counter()
        while True:
            try:
                _allocate(optimizer)
                return
            except (RuntimeError, MemoryError) as error:
                if not is_repeatable(error):
                    raise
                failure = MemoryFailure.of(error, "step", self._device, handled)
            remedy = self._next(optimizer)
            if remedy is None:
                self._go_without_temporaries(optimizer)
                return
            report_remedy(remedy, failure, type(optimizer).__name__, time.perf_counter() - started)

    def _go_without_temporaries(self, optimizer: Optimizer) -> None:
        """Let a step begin whose state can be allocated: it may need fewer temporaries than were asked for."""
        try:
            _allocate(optimizer, has_temporaries=False)
        except (RuntimeError, MemoryError) as error:
            self._states = None
            error.add_note("The optimizer's step did not begin: parameters and state are as they were.")
            raise

    def _next(self, optimizer: Optimizer) -> Remedy | None:
        """Apply the next remedy and return it."""
        if not self._has_freed:
            self._has_freed = True
            block_return.tighten(self._device)
            return FREE_CACHES
        groups = [group for group in optimizer.param_groups if _is_foreach(group)]
        for group in groups:
            group["foreach"] = False
        free_caches(self._device)
        return _LOOP if groups else None


def _updates_otherwise(optimizer: Optimizer) -> bool:
    """Return whether a step does not follow torch's rule, on the parameters that it has now."""
    record = optimizer_record(optimizer)
    others = (StepPhase.USE_MASTER_WEIGHTS, StepPhase.EXCHANGE_GRADIENTS)
    return record.is_own_rule or any(action.phase in others for action in record.actions)


@torch.no_grad()
def _allocate(optimizer: Optimizer, *, has_temporaries: bool = True) -> None:
    """Allocate what a step is going to, all at once, and free it."""
    blocks: list[Tensor] = []
    tensors = state_of(optimizer).tensors
    for group in optimizer.param_groups:
        params = [local_part(param) for param in group["params"] if param.grad is not None]
        new = [param for param in group["params"] if param.grad is not None and not optimizer.state.get(param)]
        blocks += [torch.empty_like(local_part(param)) for param in new for _ in range(tensors)]
        if has_temporaries:
            blocks += _temporaries(type(optimizer), group, params)


def _temporaries(kind: type[Optimizer], group: dict[str, Any], params: list[Tensor]) -> Iterator[Tensor]:
    if not params or group.get("fused"):
        return
    count = _SGD_TEMPORARIES if kind is SGD else _TEMPORARIES
    for param in params if _is_foreach(group) else [max(params, key=lambda param: param.nbytes)]:
        for _ in range(count):
            yield torch.empty_like(param)


def _is_foreach(group: dict[str, Any]) -> bool:
    """Return whether all parameters of a group are updated at once, operator by operator."""
    if group.get("fused") or "foreach" not in group:
        return False
    chosen = group["foreach"]
    return bool(chosen) if chosen is not None else any(is_accelerator(param.device) for param in group["params"])
