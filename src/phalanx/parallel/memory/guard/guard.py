"""`MemoryGuard`: repeat a forward or backward pass that ran out of memory, in the same call, under the next remedy.

A rank repeats its own pass, so no other rank has anything to undo: they wait. Nothing is changed while memory suffices:
the graph that a script sees is the one that its model makes. What a repetition needs is noted at every pass: inputs,
random numbers, changing buffers, and, while a backward pass runs, the gradients that arrive at the outputs.

    model(x) ──> MemoryGuard.run: note the state; out of memory: remedy, state back, the same call again
    loss.backward() ──> guarded_backward: out of memory in the model's part of the graph: let go of that graph, remedy,
                        the forward pass again, and backward from the noted gradients into what has none yet
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from phalanx import accelerator
from phalanx.comm.local.call_count import calls_issued
from phalanx.parallel.memory.failures import MemoryFailure, is_repeatable
from phalanx.parallel.memory.free_memory import block_return, can_run_out
from phalanx.parallel.memory.guard.changing_buffers import CannotRepeatError
from phalanx.parallel.memory.guard.graphs import Node
from phalanx.parallel.memory.guard.pass_state import PassState, StateKeeper, tensors_of
from phalanx.parallel.memory.guard.remedies import Remedies, Remedy, report_remedy
from phalanx.parallel.session import applied_to

T = TypeVar("T")
_numbers = count()
MARK = "phalanx.guarded_pass"
"""Key of a node's metadata under which its pass is found."""


class GuardedPass:
    """A forward pass whose backward pass is to come. Lives as long as its graph, to which it does not refer."""

    __slots__ = ("arrived", "compute", "exchanges", "guard", "is_over", "is_released", "number", "outputs", "state")

    def __init__(
        self, guard: MemoryGuard, compute: Callable[[], Any], state: PassState, *, exchanges: bool = False
    ) -> None:
        self.guard, self.compute, self.state, self.exchanges = guard, compute, state, exchanges
        self.number = next(_numbers)
        self.is_over = self.is_released = False
        self.arrived: dict[int, tuple[Tensor | None, ...]] = {}
        """By number of the node: what it was called with in the backward pass that runs."""

        self.outputs: list[tuple[weakref.ref[Tensor], int]] = []
        """The tensors that it returned, with their version counters."""

    def close(self) -> None:
        """Let go of what a repetition needs: the graph is used up, and a script may hold it for longer."""
        self.is_over = True
        self.arrived.clear()
        self.outputs.clear()
        del self.compute, self.state

    def mark(self, outputs: Any) -> None:
        """Let the nodes at the end of the graph tell what arrives."""
        for number, (node, tensors) in enumerate(last_nodes(outputs)):
            node.metadata[MARK] = self, number
            node.register_prehook(_Arrival(self, number))
            self.outputs += [(weakref.ref(tensor), tensor._version) for tensor in tensors]


class _Arrival:
    """Notes the gradients with which a node is called."""

    __slots__ = ("_number", "_pass")

    def __init__(self, guarded: GuardedPass, number: int) -> None:
        self._pass, self._number = guarded, number

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        if running.is_backward and not self._pass.is_over:
            running.in_loss = None
            self._pass.arrived[self._number] = gradients
            running.passes.add(self._pass)


class _Running:
    """What the guards of this process do now."""

    def __init__(self) -> None:
        self.is_forward = False
        """Whether a guarded forward pass runs; those within it are part of it."""

        self.is_backward = False
        self.passes: set[GuardedPass] = set()
        """Passes that gradients have arrived at in the backward pass that runs."""

        self.in_loss: tuple[object, tuple[Tensor | None, ...]] | None = None
        """Where in a loss the backward pass is that runs, and what arrived there."""


running = _Running()


def last_nodes(outputs: Any) -> list[tuple[Node, list[Tensor]]]:
    """Return the nodes that made outputs, each with its tensors, in the order of the outputs."""
    nodes: dict[Node, list[Tensor]] = {}
    for tensor in tensors_of(outputs):
        if tensor.grad_fn is not None:
            nodes.setdefault(tensor.grad_fn, []).append(tensor)
    return list(nodes.items())


@dataclass(frozen=True, slots=True)
class Sharding:
    """What `parallel.zero` knows of a sharded model's passes."""

    reset: Callable[[nn.Module], None]
    """Forgets how far a pass has come."""

    is_all_gathered: Callable[[nn.Module], bool]


class MemoryGuard:
    """What repeats the passes of one model.

    Args:
        model: The model, distributed.
        remedies: What there is to apply.
        device: Where it computes.
        sharding: How to repeat passes of a model that ZeRO shards; None for any other.
        begin: Called before the first pass that is guarded.
    """

    def __init__(
        self,
        model: nn.Module,
        remedies: Remedies,
        device: torch.device,
        sharding: Sharding | None = None,
        begin: Callable[[MemoryGuard], None] = lambda _: None,
    ) -> None:
        self.model = weakref.ref(model)
        self.remedies, self.device = remedies, device
        self.keeper = StateKeeper(model, device)
        self._sharding, self._begin = sharding, begin
        self._has_begun = False
        """Whether there was a pass."""

        self._parameters: tuple[nn.Parameter, ...] | None = None

    def parameters(self) -> tuple[nn.Parameter, ...]:
        """Return the parameters that get gradients: of a sharded model the gathered ones, of others always the same."""
        if self._parameters is not None:
            return self._parameters
        model = self.model()
        params = () if model is None else tuple(model.parameters())
        if self._sharding is None:
            self._parameters = params
        return params

    def why_backward_cannot(self) -> str | None:
        """Return why the backward pass that failed cannot be repeated; None if it can."""
        model = self.model()
        if model is None:
            return "the model is gone"
        reducer = None if (applied := applied_to(model)) is None else applied.reducer
        if reducer is not None and reducer.has_put_aside:
            return "gradients of earlier batches of the same update are put aside meanwhile"
        is_whole = self._sharding is None or self._sharding.is_all_gathered(model)
        return None if is_whole else "ZeRO has let go of parameters that it gathered"

    def forget_pass(self) -> None:
        """Undo what stands in the way of a repetition."""
        model = self.model()
        if model is not None and self._sharding is not None:
            self._sharding.reset(model)

    def can_run(self) -> bool:
        """Return whether a pass that begins now would be guarded: one with a graph, by itself, that can fail."""
        if torch.compiler.is_compiling() or running.is_forward or not torch.is_grad_enabled():
            return False
        if not can_run_out(self.device):
            return False
        if torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack():
            return False  # who looks at what operators do must not see ours
        return not accelerator.is_capturing(self.device)

    def run(self, compute: Callable[[], T], inputs: Any) -> T:
        """Return what a forward pass computes, repeated if memory runs out.

        Args:
            compute: The pass. It may be called again as long as its graph lives, so it should not keep the model alive.
            inputs: All tensors that it reads beside parameters and buffers.
        """
        if not self._has_begun:
            self._has_begun = True
            self._begin(self)
        block_return.count_pass()
        state, calls = self.keeper.keep(inputs), calls_issued()
        running.is_forward = True
        try:
            outputs = self._compute(compute, state, calls)
        finally:
            running.is_forward = False
        self.keeper.end(state)
        GuardedPass(self, compute, state, exchanges=self._exchanges_since(calls)).mark(outputs)
        return outputs

    def _exchanges_since(self, calls: int) -> bool:
        """Return whether the script's own code called collectives, which one rank alone must not call again."""
        return self._sharding is None and calls_issued() != calls

    def _compute(self, compute: Callable[[], T], state: PassState, calls: int) -> T:
        handled = sys.exception()
        while True:
            started = time.perf_counter()
            try:
                return compute()
            except (RuntimeError, MemoryError) as error:
                if not is_repeatable(error) or not self.remedies.remain():
                    raise
                if self._exchanges_since(calls):
                    error.add_note("The forward pass was not repeated with less memory: it calls collectives itself.")
                    raise
                failure = MemoryFailure.of(error, "forward", self.device, handled)
            self.remedy_next(failure, time.perf_counter() - started)
            self._restore(state, failure)

    def _restore(self, state: PassState, failure: MemoryFailure) -> None:
        self.forget_pass()
        try:
            state.restore()
        except CannotRepeatError as why:
            raise failure.error_because(str(why)) from None

    def remedy_next(self, failure: MemoryFailure, lost_s: float) -> Remedy | None:
        """Apply the next remedy if there is one, say so, and return it."""
        if not self.remedies.remain():
            return None
        remedy = self.remedies.apply_next()
        report_remedy(remedy, failure, type(self.model()).__name__, lost_s)
        return remedy
