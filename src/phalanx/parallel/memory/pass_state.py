"""`PassState`: what a forward pass reads and changes beside its inputs, kept so that it can run once more alike."""

from __future__ import annotations

import random
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves

from phalanx.errors import InternalError
from phalanx.parallel.data.bucket_buffers import stored

Restore = Callable[[], None]


class CannotRepeatError(InternalError):
    """A forward pass cannot be repeated with the same result."""


@dataclass(slots=True)
class _KeptBuffer:
    owner: nn.Module
    name: str
    buffer: Tensor
    value: Tensor | None
    """None for one that forward passes leave alone, as far as is known; then `version` says whether this one did."""

    version: int

    def is_changed(self) -> bool:
        return self.owner._buffers.get(self.name) is not self.buffer or self.buffer._version != self.version

    def restore(self) -> None:
        if self.value is not None:
            # .data leaves the version counter alone: a graph may have saved the buffer.
            stored(self.buffer.data).copy_(self.value)
            self.owner._buffers[self.name] = self.buffer
        elif self.buffer._version == self.version:  # another tensor may have taken its place
            self.owner._buffers[self.name] = self.buffer
        else:
            raise CannotRepeatError(
                f"buffer {self.name!r} of {type(self.owner).__name__} was changed by a forward pass, and its value "
                "before was not kept"
            )


class ChangingBuffers:
    """The buffers of a model, and which of them its forward passes change: only those are copied before each pass.

    The first pass shows which. Later ones are told by the version counter, which batch normalisation leaves alone: its
    statistics count as changing from the start.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._changing: set[tuple[int, str]] | None = None
        self._has_buffers = any(True for _ in model.buffers())

    def keep(self, *, every: bool = False) -> list[_KeptBuffer]:
        """Return the buffers with the values they have now."""
        model = self._model()
        if model is None or not self._has_buffers:
            return []
        is_first = self._changing is None or every
        return [
            _KeptBuffer(
                owner,
                name,
                buffer,
                stored(buffer.detach()).clone() if is_first or self._is_changing(owner, name) else None,
                buffer._version,
            )
            for owner in model.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None and not buffer.is_meta
        ]

    def _is_changing(self, owner: nn.Module, name: str) -> bool:
        return isinstance(owner, _NormBase) or (id(owner), name) in (self._changing or ())

    def learn(self, before: list[_KeptBuffer]) -> None:
        """Look at which buffers a pass that has ended changed."""
        is_first, self._changing = self._changing is None, self._changing or set()
        for entry in before:
            is_other = (
                is_first and entry.value is not None and not torch.equal(stored(entry.buffer.detach()), entry.value)
            )
            if is_other or entry.is_changed():
                self._changing.add((id(entry.owner), entry.name))


class RandomNumbers:
    """The random numbers that a model's forward passes draw: torch's always, others if the first pass drew any."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._draws_others: bool | None = None

    def keep(self) -> list[Restore]:
        """Return what gives generators back the states that they have now."""
        states: list[Restore] = [_restore(torch.set_rng_state, torch.get_rng_state())]
        if self._is_cuda:
            states.append(_restore(torch.cuda.set_rng_state, torch.cuda.get_rng_state()))
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

    _MOST_ELEMENTS = 1 << 16
    """Of a buffer that is copied, changed or not; of a larger one a change in place is an error."""

    def __init__(self, module: nn.Module) -> None:
        self._random_states = [_restore(setter, state) for setter, state in _other_states()]
        self._buffers = [
            _KeptBuffer(
                owner,
                name,
                buffer,
                stored(buffer.detach()).clone() if buffer.numel() <= self._MOST_ELEMENTS else None,
                buffer._version,
            )
            for owner in module.modules()
            if not isinstance(owner, _NormBase)  # in training it does not read its statistics
            for name, buffer in owner._buffers.items()
            if buffer is not None and not buffer.is_meta
        ]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Begin the block with that state; random numbers are afterwards what they were before it."""
        now = [_restore(setter, state) for setter, state in _other_states()]
        for entry in self._buffers:
            entry.restore()
        for restore in self._random_states:
            restore()
        try:
            yield
        finally:
            for restore in now:
                restore()


def _nothing() -> None:
    pass


def _has_version(tensor: Tensor) -> bool:
    return not tensor.is_inference()  # which nobody can change in training


@dataclass(slots=True)
class PassState:
    """What one forward pass began with."""

    buffers: list[_KeptBuffer]
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
        for entry in self.buffers:
            entry.restore()
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
            [(leaf, leaf._version) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and _has_version(leaf)],
        )

    def end(self, state: PassState) -> None:
        """Learn from a pass that has ended what to keep of the next ones."""
        if self._look is not None:
            self._look()
        self._buffers.learn(state.buffers)

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Let what the block does to buffers and random numbers leave no trace."""
        before = self._buffers.keep(every=True)
        states = [*self._random.keep(), *(_restore(setter, state) for setter, state in _other_states())]
        try:
            yield
        finally:
            for entry in before:
                entry.restore()
            for restore in states:
                restore()
