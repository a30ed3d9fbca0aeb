"""`backward_guarded`: `torch.autograd.backward` that repeats a distributed model's part when memory runs out.

The part of the graph that the script made, its loss, is walked once and never again; it has to have given its gradients
to the model's outputs before. Whatever cannot be repeated exactly is left to the error, with the reason in a note.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import phalanx.comm.context as context_of
from phalanx.comm.batch.backward_end import forget_interrupted, repeated_pass
from phalanx.parallel.memory.failures import MemoryFailure, is_out_of_memory
from phalanx.parallel.memory.graphs import Node, leaves_of, reach, release
from phalanx.parallel.memory.guard import MARK, GuardedPass, MemoryGuard, last_nodes, running
from phalanx.parallel.memory.pass_state import CannotRepeatError

Backward = Callable[..., None]

_guards: weakref.WeakSet[MemoryGuard] = weakref.WeakSet()
"""Those of this process whose backward passes can be repeated."""

_NOT_UNDONE = (
    "phalanx.parallel.data.reducer",
    "phalanx.parallel.data.replica_round",
    "phalanx.parallel.data.replica_sums",
    "phalanx.parallel.zero",
    "phalanx.comm",
    "torch.distributed",
)
"""Modules in which an error may have left a reduction half done."""


def guard_backward(guard: MemoryGuard) -> None:
    """Let backward passes through a model be repeated, by whatever call they are made.

    A script calls `loss.backward()` on a tensor of its own, so the only place to catch its error is torch's function;
    it is replaced when the first model is guarded.
    """
    _guards.add(guard)
    if not hasattr(torch.autograd.backward, "_phalanx_guarded"):
        torch.autograd.backward = _guarded(torch.autograd.backward)


def _guarded(backward: Backward) -> Backward:
    @wraps(backward)
    def backward_guarded(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        is_plain = not (create_graph or retain_graph or inputs is not None or running.is_backward)
        if torch.compiler.is_compiling() or not is_plain or not _guards or torch._C._current_graph_task_id() != -1:
            backward(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
            return
        running.is_backward = True
        try:
            _attempt(backward, tensors, grad_tensors, grad_variables)
        finally:
            running.is_backward = False
            while running.passes:
                running.passes.pop().close()

    backward_guarded._phalanx_guarded = True  # type: ignore[attr-defined]
    return backward_guarded


Gradients = list[tuple[Tensor, Tensor | None, int]]
"""Parameters, their gradients before a backward pass, and the version counters of these."""


def _attempt(backward: Backward, tensors: Any, *gradients: Any) -> None:
    before, handled = _gradients_now(), sys.exception()
    started = time.perf_counter()
    forget_interrupted()
    try:
        backward(tensors, gradients[0], grad_variables=gradients[1])
        return
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        repetition = _plan_repetition(tensors, before, error)
        if isinstance(repetition, str):
            error.add_note(f"The backward pass was not repeated with less memory: {repetition}.{_advice()}")
            raise
        device = repetition.passes[0].guard.device
        failure = MemoryFailure.of(error, "backward", device, handled)
    del tensors
    while True:
        for guard in dict.fromkeys(guarded.guard for guarded in repetition.passes):
            if guard.remedies.remain():
                guard.remedy(failure, time.perf_counter() - started)
        started = time.perf_counter()
        try:
            repetition.run(backward, failure)
            return
        except (RuntimeError, MemoryError) as error:
            can_go_on = is_out_of_memory(error) and error is not failure.error and repetition.can_go_on()
            if not can_go_on or _is_in_reduction(error):
                raise
            failure = MemoryFailure.of(error, "backward", device, handled)


def _gradients_now() -> Gradients:
    return [
        (param, grad := param.grad, -1 if grad is None else grad._version)
        for guard in _guards
        for param in guard.parameters()
    ]


@dataclass(slots=True)
class _Repetition:
    """What to do in the place of a backward pass that ran out of memory."""

    passes: list[GuardedPass]
    before: Gradients

    def can_go_on(self) -> bool:
        """Return whether a further remedy remains."""
        return any(guarded.guard.remedies.remain() for guarded in self.passes)

    def run(self, backward: Backward, failure: MemoryFailure) -> None:
        """Compute the forward passes again, and the gradients that parameters have not got yet."""
        context_of.current().passes.abandon_backward()
        with ExitStack() as stack:
            for guard in dict.fromkeys(guarded.guard for guarded in self.passes):
                guard.forget_pass()
                stack.enter_context(guard.keeper.elsewhere())
            outputs = [_forward_again(guarded, failure) for guarded in self.passes]
        roots: list[tuple[Tensor, Tensor]] = []
        for guarded, computed in zip(self.passes, outputs, strict=True):
            roots += _roots(guarded, computed)
        del outputs
        remaining = [param for param, grad, version in self.before if _is_untouched(param, grad, version)]
        with repeated_pass():
            if remaining:
                backward([root for root, _ in roots], [gradient for _, gradient in roots], inputs=remaining)


def _is_untouched(param: Tensor, grad: Tensor | None, version: int) -> bool:
    return param.requires_grad and param.grad is grad and (grad is None or grad._version == version)


def _forward_again(guarded: GuardedPass, failure: MemoryFailure) -> Any:
    try:
        guarded.state.restore()
    except CannotRepeatError as why:
        raise failure.error_because(str(why)) from None
    running.is_forward = True
    try:
        with guarded.state.again():
            outputs = guarded.compute()
    finally:
        running.is_forward = False
    tensors = [tensor for _, group in last_nodes(outputs) for tensor in group]
    if len(tensors) != len(guarded.outputs):
        raise failure.error_because("the forward pass returned other outputs the second time")
    for (reference, version), tensor in zip(guarded.outputs, tensors, strict=True):
        first = reference()
        if first is not None and first._version == version and not _is_same(first.detach(), tensor.detach()):
            raise failure.error_because("the forward pass computed other values the second time")
    return outputs


def _is_same(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first, second) or bool(((first == second) | (first.isnan() & second.isnan())).all())


def _roots(guarded: GuardedPass, outputs: Any) -> list[tuple[Tensor, Tensor]]:
    """Return the tensors from which to go backward, each with its gradient.

    Where one output was computed from another, what arrived at that has the other's part in it already: nodes are
    called with what arrived, whatever comes to them now.
    """
    roots = []
    for number, (node, tensors) in enumerate(last_nodes(outputs)):
        arrived = guarded.arrived.get(number)
        if arrived is None:
            continue
        node.register_prehook(_Replacing(arrived))
        for tensor in tensors:
            gradient = arrived[tensor.output_nr]
            if gradient is not None:
                roots.append((tensor, gradient))
    return roots


class _Replacing:
    def __init__(self, gradients: tuple[Tensor | None, ...]) -> None:
        self._gradients = gradients

    def __call__(self, _: Any) -> tuple[Tensor | None, ...]:
        return self._gradients


def _plan_repetition(tensors: Any, before: Gradients, error: BaseException) -> _Repetition | str:
    """Return how to repeat a backward pass, or why that cannot be done exactly."""
    if _is_in_reduction(error):
        return "memory ran out while gradients were reduced"
    made_by_script, ends = reach(_nodes_of(tensors), lambda node: MARK in node.metadata)
    marks: list[tuple[GuardedPass, int]] = [node.metadata[MARK] for node in ends]
    passes = sorted({guarded for guarded, _ in marks}, key=lambda guarded: guarded.number)
    why = _why_not_again(passes)
    if why is not None:
        return why
    if any(number not in guarded.arrived for guarded, number in marks):
        return "it ran out before gradients had arrived at all outputs of the model"
    of_model, _ = reach(ends)
    if any(MARK in node.metadata and node.metadata[MARK][0] not in passes for node in of_model):
        return "inputs of the model have gradients, too"
    own = {id(param) for param, _, _ in before}
    if made_by_script & of_model or any(id(leaf) not in own for leaf in leaves_of(of_model)):
        return "the loss uses parameters, or what the model computed within, beside its outputs"
    repetition = _Repetition(passes, before)
    if not repetition.can_go_on():
        return "no remedy is left"
    release(made_by_script | of_model)
    return repetition


def _why_not_again(passes: Sequence[GuardedPass]) -> str | None:
    """Return why forward passes cannot be computed again."""
    if not passes:
        return "it goes through no call of a distributed model"
    for guarded in passes:
        if guarded.is_over:
            return "it went through a graph that was used up before"
        if (why := guarded.guard.why_backward_cannot()) is not None:
            return why
        if guarded.exchanges:
            return "its forward pass calls collectives itself"
        if any(tensor.requires_grad for tensor, _ in guarded.state.inputs):
            return "inputs of the model have gradients, too"
    return None


def _advice() -> str:
    setting = next((setting for guard in _guards if (setting := guard.remedies.setting())), "")
    return f" To need less from the start: {setting}." if setting else ""


def _nodes_of(tensors: Any) -> Sequence[Node]:
    leaves = tree_leaves(tensors)
    nodes = [leaf.grad_fn if isinstance(leaf, Tensor) else getattr(leaf, "node", None) for leaf in leaves]
    return [node for node in nodes if node is not None]


def _is_in_reduction(error: BaseException) -> bool:
    at = error.__traceback__
    while at is not None:
        name = at.tb_frame.f_globals.get("__name__", "")
        if name.startswith(_NOT_UNDONE):
            return True
        at = at.tb_next
    return False
