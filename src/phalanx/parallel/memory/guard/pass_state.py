"""`PassState`: what a forward pass reads and changes beside its inputs, kept so that it can run once more alike."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from phalanx import accelerator
from phalanx.parallel.memory.guard.changing_buffers import (
    CannotRepeatError,
    ChangingBuffers,
    KeptBuffers,
    keep_buffers,
    list_slots,
)

Restore = Callable[[], None]


class RandomNumbers:
    """The random numbers that a model's forward passes draw: torch's always, others if the first pass drew any."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._draws_others: bool | None = None

    def keep(self) -> list[Restore]:
        """Return what gives generators back the states that they have now."""
        states: list[Restore] = [_restore(torch.set_rng_state, torch.get_rng_state())]
        if accelerator.is_accelerator(self._device):
            setter = partial(accelerator.set_random_state, self._device)
            states.append(_restore(setter, accelerator.random_state(self._device)))
        if self._draws_others is None or self._draws_others:
            states += [_restore(setter, state) for setter, state in _other_states()]
        return states

    def watch(self) -> Callable[[], None]:
        """Return what looks, after the first pass, whether it drew numbers of Python or NumPy."""
        if self._draws_others is not None:
            return _nothing
        before = [repr(state) for _, state in _other_states()]

        def look() -> None:
            self._draws_others = before != [repr(state) for _, state in _other_states()]

        return look


def _other_states() -> list[tuple[Callable[[Any], Any], Any]]:
    states: list[tuple[Callable[[Any], Any], Any]] = [(random.setstate, random.getstate())]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states.append((numpy.random.set_state, numpy.random.get_state()))
    return states


def _restore(setter: Callable[[Any], Any], state: Any) -> Restore:
    return lambda: setter(state)


class ModuleState:
    """What a module's forward pass begins with beside what torch's checkpoints keep.

    That is buffers that it reads and may change, and random numbers of Python and NumPy.
    """

    def __init__(self, module: nn.Module) -> None:
        self._random_states = [_restore(setter, state) for setter, state in _other_states()]
        # In training, batch norm does not read its statistics.
        self._buffers = keep_buffers([slot for slot in list_slots(module) if not slot.is_norm])

    @contextmanager
    def again(self) -> Iterator[None]:
        """Begin the block with that state; random numbers are afterwards what they were before it."""
        now = [_restore(setter, state) for setter, state in _other_states()]
        self._buffers.restore()
        for restore in self._random_states:
            restore()
        try:
            yield
        finally:
            for restore in now:
                restore()


def tensors_of(values: Any) -> list[Tensor]:
    """Return the tensors in nested values, in their order."""
    if isinstance(values, Tensor):  # torch's function takes 5 us
        return [values]
    if type(values) is tuple and all(isinstance(value, Tensor) for value in values):
        return list(values)
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _nothing() -> None:
    pass


def _has_version(tensor: Tensor) -> bool:
    return not tensor.is_inference()  # which nobody can change in training


@dataclass(slots=True)
class PassState:
    """What one forward pass began with."""

    buffers: KeptBuffers
    random_states: list[Restore]
    autocast: tuple[str, bool, torch.dtype]
    inputs: list[tuple[Tensor, int]]
    """Its inputs, and their version counters."""

    def restore(self) -> None:
        """Put buffers and random numbers back.

        Raises:
            CannotRepeatError: If what the pass began with is gone.
        """
        if any(tensor._version != version for tensor, version in self.inputs):
            raise CannotRepeatError("an input was changed in place")
        self.buffers.restore()
        for restore in self.random_states:
            restore()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Compute in the block as the pass did: same precision, gradients on."""
        device_type, is_on, dtype = self.autocast
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autocast(device_type, dtype=dtype, enabled=is_on))
            yield


class StateKeeper:
    """Keeps the state of a model's forward passes."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device_type = device.type
        self._random = RandomNumbers(device)
        self._buffers = ChangingBuffers(model)
        self._look: Callable[[], None] | None = None

    def keep(self, inputs: Any) -> PassState:
        """Return the state that a pass begins with."""
        self._look = self._random.watch()
        kind = self._device_type
        return PassState(
            self._buffers.keep(),
            self._random.keep(),
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
            [(tensor, tensor._version) for tensor in tensors_of(inputs) if _has_version(tensor)],
        )

    def end(self, state: PassState) -> None:
        """Learn from a pass that has ended what to keep of the next ones."""
        if self._look is not None:
            self._look()
        self._buffers.learn(state.buffers)

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Let what the block does to buffers and random numbers leave no trace."""
        before = self._buffers.keep_all()
        states = [*self._random.keep(), *(_restore(setter, state) for setter, state in _other_states())]
        try:
            yield
        finally:
            before.restore()
            for restore in states:
                restore()
