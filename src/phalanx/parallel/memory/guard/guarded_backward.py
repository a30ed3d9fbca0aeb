"""`guard_backward`: a backward pass that repeats a distributed model's part when memory runs out.

The part of the graph that the script made, its loss, is walked once and never again; it has to have given its gradients
to the model's outputs before. Whatever cannot be repeated exactly is left to the error, with the reason in a note.
"""

from __future__ import annotations

import sys
import time
import weakref
from typing import Any

import torch

from phalanx.comm.batch.backward_calls import Backward, BackwardOrder, around_backward
from phalanx.comm.batch.backward_end import forget_interrupted
from phalanx.parallel.memory.failures import MemoryFailure, is_repeatable
from phalanx.parallel.memory.guard.graphs import ReleasedGraphError
from phalanx.parallel.memory.guard.guard import MemoryGuard, running
from phalanx.parallel.memory.guard.loss_point import LossPoint
from phalanx.parallel.memory.guard.repetition import GradientsBefore, Repetition, plan_repetition

_guards: weakref.WeakSet[MemoryGuard] = weakref.WeakSet()
"""Those of this process whose backward passes can be repeated."""

_NOT_UNDONE = (
    "phalanx.parallel.data.reducer",
    "phalanx.parallel.data.replicas",
    "phalanx.parallel.zero",
    "phalanx.comm",
    "torch.distributed",
)
"""Modules in which an error may have left a reduction half done."""


def guard_backward(guard: MemoryGuard) -> None:
    """Let backward passes through a model be repeated, by whatever call they are made."""
    _guards.add(guard)
    around_backward(BackwardOrder.MEMORY, _guarded)


def guarded_parameters() -> set[int]:
    """Return the identities of the parameters of all guarded models."""
    return {id(param) for guard in _guards for param in guard.parameters()}


def _guarded(
    backward: Backward,
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    is_plain = not (create_graph or retain_graph or inputs is not None or running.is_backward)
    if not is_plain or not _guards or torch._C._current_graph_task_id() != -1:
        backward(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
        return
    running.is_backward = True
    try:
        _attempt(backward, tensors, grad_tensors, grad_variables)
    finally:
        running.is_backward, running.in_loss = False, None
        while running.passes:
            running.passes.pop().close()


def _attempt(backward: Backward, tensors: Any, *gradients: Any) -> None:
    before, handled = GradientsBefore.of(list(_guards)), sys.exception()
    started = time.perf_counter()
    forget_interrupted()
    try:
        backward(tensors, gradients[0], grad_variables=gradients[1])
        return
    except (RuntimeError, MemoryError) as error:
        # Where the loss ran out of memory, its remedy is applied and the graph gone already.
        needs_remedy = not isinstance(error, ReleasedGraphError)
        if needs_remedy and not is_repeatable(error):
            raise
        plan = _plan(tensors, before, error, needs_remedy=needs_remedy)
        if isinstance(plan, str):
            error.add_note(f"The backward pass was not repeated with less memory: {plan}.{_advice()}")
            raise
        failure = MemoryFailure.of(error, "backward", plan.passes[0].guard.device, handled)
    del tensors, before
    if isinstance(plan, Repetition):
        if needs_remedy:
            _apply_next(plan, failure, started)
        _repeat(backward, plan, failure, handled)
        return
    plan.graph.make_room(failure, time.perf_counter() - started)
    edge, gradient = plan.edge, plan.gradient
    del plan
    _attempt(backward, [edge], [gradient], None)


def _plan(
    tensors: Any, before: GradientsBefore, error: BaseException, *, needs_remedy: bool
) -> Repetition | LossPoint | str:
    """Return how to continue after an error, or why that cannot be done."""
    if _is_in_reduction(error):
        return "memory ran out while gradients were reduced"
    if needs_remedy and (point := LossPoint.of(tensors, guarded_parameters())) is not None:
        return point
    return plan_repetition(tensors, before, needs_remedy=needs_remedy)


def _repeat(backward: Backward, repetition: Repetition, failure: MemoryFailure, handled: BaseException | None) -> None:
    """Repeat the model's part, under one remedy after the other."""
    while True:
        started = time.perf_counter()
        try:
            repetition.run(backward, failure)
            return
        except (RuntimeError, MemoryError) as error:
            can_go_on = is_repeatable(error) and error is not failure.error and repetition.can_go_on()
            if not can_go_on or _is_in_reduction(error):
                raise
            failure = MemoryFailure.of(error, "backward", repetition.passes[0].guard.device, handled)
        _apply_next(repetition, failure, started)


def _apply_next(repetition: Repetition, failure: MemoryFailure, started: float) -> None:
    for guard in dict.fromkeys(guarded.guard for guarded in repetition.passes):
        guard.remedy_next(failure, time.perf_counter() - started)


def _advice() -> str:
    setting = next((setting for guard in _guards if (setting := guard.remedies.setting())), "")
    return f" To need less from the start: {setting}." if setting else ""


def _is_in_reduction(error: BaseException) -> bool:
    at = error.__traceback__
    while at is not None:
        name = at.tb_frame.f_globals.get("__name__", "")
        if name.startswith(_NOT_UNDONE):
            return True
        at = at.tb_next
    return False
