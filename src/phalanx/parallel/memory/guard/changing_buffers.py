"""`ChangingBuffers`: what buffers were before a forward pass; only those that a model's passes change are copied."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import is_

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from phalanx.errors import InternalError
from phalanx.parallel.data.bucket_buffers import stored

MOST_ELEMENTS = 1 << 16
"""Of a buffer that is copied; a pass that changes a larger one in place is not repeated."""


class CannotRepeatError(InternalError):
    """A forward pass cannot be repeated with the same result."""


@dataclass(frozen=True, slots=True, eq=False)
class BufferSlot:
    """Where a module has a buffer, or None. It does not keep the module alive."""

    owner: str
    buffers: dict[str, Tensor | None]
    """All of the module's."""

    name: str
    is_norm: bool

    @property
    def key(self) -> tuple[int, str]:
        """Return what tells it from all others, as long as its module lives."""
        return id(self.buffers), self.name

    def is_small(self) -> bool:
        """Return whether there is a buffer, small enough to be copied before every pass."""
        buffer = self.buffers.get(self.name)
        return buffer is not None and not buffer.is_meta and stored(buffer.detach()).numel() <= MOST_ELEMENTS


def list_slots(model: nn.Module) -> list[BufferSlot]:
    """Return where a model and its modules have buffers."""
    return [
        BufferSlot(type(owner).__name__, owner._buffers, name, isinstance(owner, _NormBase))
        for owner in model.modules()
        for name in owner._buffers
    ]


class JointCopy:
    """Copies the same tensors again and again; those of one type, stored in a row, in one call."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._pointers = [tensor.data_ptr() for tensor in tensors]
        self._versions = [tensor._version for tensor in tensors]
        # .data has a version counter of its own: a graph may have saved the buffer.
        self._aliases = [_in_a_row(stored(tensor.data)) for tensor in tensors]
        groups: dict[object, list[int]] = {}
        for index, alias in enumerate(self._aliases):
            is_plain = type(alias) is Tensor and alias.dim() == 1
            groups.setdefault((alias.dtype, alias.device) if is_plain else index, []).append(index)
        self._indexes = list(groups.values())
        self._groups = [[self._aliases[index] for index in indexes] for indexes in self._indexes]

    def is_of(self, tensors: Sequence[Tensor | None]) -> bool:
        """Return whether tensors are still these, in the memory where they were."""
        if len(tensors) != len(self._tensors) or not all(map(is_, tensors, self._tensors)):
            return False
        return [tensor.data_ptr() for tensor in self._tensors] == self._pointers

    def values(self) -> list[Tensor]:
        """Return copies of what the tensors hold now."""
        return [torch.cat(group) if len(group) > 1 else group[0].clone() for group in self._groups]

    def restore(self, values: Sequence[Tensor]) -> None:
        """Put copies back."""
        for alias, value in self._pairs(values):
            alias.copy_(value)

    def changed(self, values: Sequence[Tensor]) -> list[int]:
        """Return the numbers of the tensors that were written to since this was made, as far as that shows."""
        pairs = zip(self._tensors, self._versions, self._pairs(values), strict=True)
        return [
            at
            for at, (tensor, version, (alias, value)) in enumerate(pairs)
            if tensor._version != version or not torch.equal(alias, value)
        ]

    def _pairs(self, values: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        copies = list(self._aliases)
        for indexes, group, value in zip(self._indexes, self._groups, values, strict=True):
            parts = value.split([alias.numel() for alias in group]) if len(group) > 1 else (value,)
            for index, part in zip(indexes, parts, strict=True):
                copies[index] = part
        return list(zip(self._aliases, copies, strict=True))


def _in_a_row(tensor: Tensor) -> Tensor:
    return tensor.view(-1) if type(tensor) is Tensor and tensor.is_contiguous() else tensor


class KeptBuffers:
    """What the buffers of a model were when a forward pass began: copies of some, the version counters of others."""

    __slots__ = ("_buffers", "_owner", "_slots", "_values", "_versions", "_watched", "_watched_slots", "copy")

    def __init__(
        self,
        copied: Sequence[BufferSlot],
        watched: Sequence[BufferSlot],
        copy: JointCopy | None = None,
        owner: ChangingBuffers | None = None,
    ) -> None:
        """Take what slots hold now.

        Args:
            copied: Whose values are copied.
            watched: Whose buffers passes leave alone, or replace by others.
            copy: One of the same slots, made before.
            owner: Knows which slots the model had when it was looked at; None if that was just now.
        """
        self._slots, self._watched_slots, self._owner = copied, watched, owner
        self._buffers = [slot.buffers.get(slot.name) for slot in copied]
        self.copy = copy if copy is not None and copy.is_of(self._buffers) else JointCopy(_present(self._buffers))
        self._values = self.copy.values()
        self._watched = [slot.buffers.get(slot.name) for slot in watched]
        self._versions = _versions(self._watched)

    def restore(self) -> None:
        """Put everything back.

        Raises:
            CannotRepeatError: If a buffer that was not copied was changed in place since.
        """
        for slot in [*self.list_modified(), *(self._owner.list_unknown() if self._owner is not None else ())]:
            raise CannotRepeatError(
                f"buffer {slot.name!r} of {slot.owner} was changed by a forward pass, and its value before was not kept"
            )
        for slot, buffer in zip(self._watched_slots, self._watched, strict=True):
            slot.buffers[slot.name] = buffer
        self.copy.restore(self._values)
        for slot, buffer in zip(self._slots, self._buffers, strict=True):
            slot.buffers[slot.name] = buffer

    def list_changed(self) -> list[BufferSlot]:
        """Return where buffers that were copied hold other values since."""
        present = [slot for slot, buffer in zip(self._slots, self._buffers, strict=True) if buffer is not None]
        return [present[at] for at in self.copy.changed(self._values)]

    def list_modified(self) -> list[BufferSlot]:
        """Return where buffers that were watched have been changed in place since."""
        now = _versions(self._watched)
        if now == self._versions:
            return []
        pairs = zip(self._watched_slots, self._versions, now, strict=True)
        return [slot for slot, before, after in pairs if before != after]


def _present(buffers: Sequence[Tensor | None]) -> list[Tensor]:
    return [buffer for buffer in buffers if buffer is not None]


def _versions(buffers: Sequence[Tensor | None]) -> list[int]:
    return [0 if buffer is None else buffer._version for buffer in buffers]


def keep_buffers(slots: Sequence[BufferSlot]) -> KeptBuffers:
    """Return what slots hold now, whatever a pass changes; large buffers are watched only."""
    return KeptBuffers(*_parted(slots, {slot.key for slot in slots}))


def _parted(slots: Iterable[BufferSlot], changing: set[tuple[int, str]]) -> tuple[list[BufferSlot], list[BufferSlot]]:
    """Return the slots to copy, and those to watch."""
    copied, watched = list[BufferSlot](), list[BufferSlot]()
    for slot in slots:
        (copied if slot.key in changing and slot.is_small() else watched).append(slot)
    return copied, watched


class ChangingBuffers:
    """The buffers of a model, and which of them its forward passes change: only those are copied before each pass.

    The first pass shows which. Later ones are told by the version counter, which batch normalisation leaves alone: its
    statistics count as changing from the start.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._slots: list[BufferSlot] | None = None
        """None until the first pass has ended."""

        self._changing = set[tuple[int, str]]()
        self._copied: list[BufferSlot] = []
        self._watched: list[BufferSlot] = []
        self._copy: JointCopy | None = None

    def keep(self) -> KeptBuffers:
        """Return the buffers that passes change with the values that they have now, and the versions of the others."""
        if self._slots is None:
            return self.keep_all()
        buffers = KeptBuffers(self._copied, self._watched, self._copy, self)
        self._copy = buffers.copy
        return buffers

    def keep_all(self) -> KeptBuffers:
        """Return all small buffers with the values that they have now, and the versions of the others."""
        return keep_buffers(self._list())

    def learn(self, before: KeptBuffers) -> None:
        """Look at which buffers a pass that has ended changed."""
        if self._slots is None:
            self._slots = self._list()
            self._choose([*before.list_changed(), *(slot for slot in self._slots if slot.is_norm)])
        elif (modified := before.list_modified()) and not self._changing.issuperset(slot.key for slot in modified):
            self._choose(modified)

    def list_unknown(self) -> list[BufferSlot]:
        """Return the slots that the model has got since its first pass."""
        listed = {slot.key for slot in self._slots or ()}
        return [slot for slot in self._list() if slot.key not in listed]

    def _list(self) -> list[BufferSlot]:
        model = self._model()
        return [] if model is None else list_slots(model)

    def _choose(self, changing: Iterable[BufferSlot]) -> None:
        self._changing.update(slot.key for slot in changing)
        self._copied, self._watched = _parted(self._slots or (), self._changing)
        self._copy = None
