"""`Repetition`: the model's part of a backward pass once more, from the gradients that arrived at its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import phalanx.comm.context as context_of
from phalanx.comm.batch.backward_calls import Backward
from phalanx.comm.batch.backward_end import repeated_pass
from phalanx.parallel.memory.failures import MemoryFailure
from phalanx.parallel.memory.free_memory import free_caches
from phalanx.parallel.memory.guard.changing_buffers import CannotRepeatError
from phalanx.parallel.memory.guard.graphs import Node, leaves_of, nodes_of, reach, release
from phalanx.parallel.memory.guard.guard import MARK, GuardedPass, MemoryGuard, last_nodes, running
from phalanx.parallel.memory.guard.remedies import FREE_CACHES

BESIDE_OUTPUTS = "the loss uses parameters, or what the model computed within, beside its outputs"


@dataclass(slots=True)
class GradientsBefore:
    """The gradients that parameters had before a backward pass."""

    params: list[Tensor]
    grads: list[Tensor | None]
    versions: list[int]
    """Version counters of those that are not None."""

    @classmethod
    def of(cls, guards: Sequence[MemoryGuard]) -> GradientsBefore:
        """Return what the parameters of guarded models have now."""
        params: list[Tensor] = [param for guard in guards for param in guard.parameters()]
        grads = [param.grad for param in params]
        return cls(params, grads, [grad._version for grad in grads if grad is not None])

    def untouched(self) -> list[Tensor]:
        """Return the parameters whose gradients are still what they were."""
        versions = iter(self.versions)
        pairs = [
            (param, grad, None if grad is None else next(versions))
            for param, grad in zip(self.params, self.grads, strict=True)
        ]
        return [
            param
            for param, grad, version in pairs
            if param.requires_grad and param.grad is grad and (grad is None or grad._version == version)
        ]


@dataclass(slots=True)
class GuardedGraph:
    """The graph of a loss that goes through guarded passes."""

    passes: list[GuardedPass]
    """In the order in which they were made."""

    marks: list[tuple[GuardedPass, int]]
    """Which of their last nodes the loss comes to."""

    made_by_script: set[Node]
    of_model: set[Node]

    @classmethod
    def of(cls, tensors: Any) -> GuardedGraph:
        """Return the graph behind tensors."""
        made_by_script, ends = reach(nodes_of(tensors), lambda node: MARK in node.metadata)
        marks: list[tuple[GuardedPass, int]] = [node.metadata[MARK] for node in ends]
        passes = sorted({guarded for guarded, _ in marks}, key=lambda guarded: guarded.number)
        return cls(passes, marks, made_by_script, reach(ends)[0])

    def why_not_again(self, own: set[int]) -> str | None:
        """Return why the passes, and a backward pass through them, cannot be computed again; None if they can.

        Args:
            own: The identities of the parameters of all guarded models.
        """
        if not self.passes:
            return "it goes through no call of a distributed model"
        for guarded in self.passes:
            if guarded.is_over:
                return "it went through a graph that was used up before"
            if (why := guarded.guard.why_backward_cannot()) is not None:
                return why
            if guarded.exchanges:
                return "its forward pass calls collectives itself"
            if any(tensor.requires_grad for tensor, _ in guarded.state.inputs):
                return "inputs of the model have gradients, too"
        if any(MARK in node.metadata and node.metadata[MARK][0] not in self.passes for node in self.of_model):
            return "inputs of the model have gradients, too"
        if self.made_by_script & self.of_model or any(id(leaf) not in own for leaf in leaves_of(self.of_model)):
            return BESIDE_OUTPUTS
        return None if self._is_script_first() else BESIDE_OUTPUTS

    def _is_script_first(self) -> bool:
        """Return whether parameters that the script's part uses have their gradients before the model's part begins.

        Torch calls the nodes that were made last first.
        """
        if not leaves_of(self.made_by_script):
            return True
        of_script: list[int] = [node._sequence_nr() for node in self.made_by_script if not hasattr(node, "variable")]
        of_model: list[int] = [node._sequence_nr() for node in self.of_model if not hasattr(node, "variable")]
        return min(of_script, default=0) > max(of_model, default=0)

    @property
    def is_released(self) -> bool:
        """Return whether what the model's part had saved is gone."""
        return all(guarded.is_released for guarded in self.passes)

    def make_room(self, failure: MemoryFailure, lost_s: float) -> None:
        """Apply the next remedy; where freeing caches was not enough, let go of what the model's part has saved, too.

        Args:
            failure: What ran out of memory: something of the script's part.
            lost_s: Seconds of what is done again.
        """
        guards = dict.fromkeys(guarded.guard for guarded in self.passes)
        remedies = [guard.remedy_next(failure, lost_s) for guard in guards]
        if all(remedy is FREE_CACHES for remedy in remedies):
            return
        release(self.of_model)
        free_caches(self.passes[0].guard.device)
        for guarded in self.passes:
            guarded.is_released = True


@dataclass(slots=True)
class Repetition:
    """What to do in the place of a backward pass that ran out of memory."""

    passes: list[GuardedPass]
    before: GradientsBefore

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
        remaining = self.before.untouched()
        with repeated_pass():
            if remaining:
                backward([root for root, _ in roots], [gradient for _, gradient in roots], inputs=remaining)


def plan_repetition(tensors: Any, before: GradientsBefore, *, needs_remedy: bool) -> Repetition | str:
    """Return how to repeat a backward pass, or why that cannot be done exactly; lets go of the graph if it can."""
    graph = GuardedGraph.of(tensors)
    why = graph.why_not_again({id(param) for param in before.params})
    if why is not None:
        return why
    if any(number not in guarded.arrived for guarded, number in graph.marks):
        return "it ran out before gradients had arrived at all outputs of the model"
    repetition = Repetition(graph.passes, before)
    if needs_remedy and not repetition.can_go_on():
        return "no remedy is left"
    release(graph.made_by_script | graph.of_model)
    return repetition


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
