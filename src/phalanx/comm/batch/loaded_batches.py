"""`LoadedBatch`, `WaitingBatches`, `BatchMemory`: batches that loaders gave out, those unused yet, and their memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from phalanx.comm.batch.replicas import ReplicaTurn
from phalanx.comm.batch.share import BatchShare, Shares

READ_AHEAD = 64
"""Batches, of which nothing is left, that may wait to be computed on; a loop that reads further ahead keeps them."""


@dataclass(eq=False, slots=True)
class Iteration:
    """One pass of a script over a loader."""

    is_training: bool
    shares: Shares = ()
    """What its batches may be, as far as that is known before they come."""

    is_resumed: bool = False
    """Whether it begins inside an epoch."""

    rounds: int | None = None
    """Global batches of it; None where that is not known, or of no use."""

    count: int = 0
    """Batches given out."""

    is_used: bool = False
    """Whether something was computed on one of its batches."""

    is_over: bool = False

    left_at: str = ""
    """File and line at which the loop left it before its end."""


@dataclass(eq=False, slots=True)
class LoadedBatch:
    """A batch that a loader gave out."""

    share: BatchShare
    iteration: Iteration
    number: int
    """Its place among all that were given out."""

    turn: ReplicaTurn | None = None
    """The logical replica that computes on it."""

    memory: list[StorageWeakRef] = field(default_factory=list)

    @property
    def is_gone(self) -> bool:
        """Whether none of its tensors is left."""
        return all(storage.expired() for storage in self.memory)


class WaitingBatches:
    """Training batches that nothing was computed on yet, by pass and share: an epoch has few different."""

    def __init__(self) -> None:
        self._batches: dict[tuple[Iteration, BatchShare], dict[LoadedBatch, None]] = {}
        self.count = 0
        self._full = 2 * READ_AHEAD

    @property
    def shares(self) -> Shares:
        """What they may be, each once."""
        return tuple({share: None for _, share in self._batches})

    @property
    def epochs(self) -> Shares:
        """All that the epochs they are of hold: what was not given out yet is to be as well known as what was."""
        return tuple({share: None for iteration, own in self._batches for share in (own, *iteration.shares)})

    def shares_where(self, is_meant: Callable[[LoadedBatch], bool]) -> Shares:
        """Return what those that are meant may be."""
        return tuple({share: None for (_, share), group in self._batches.items() if any(map(is_meant, group))})

    @property
    def only(self) -> LoadedBatch | None:
        """The batch that waits, if it is alone."""
        return next(iter(next(iter(self._batches.values())))) if self.count == 1 else None

    def add(self, entry: LoadedBatch) -> None:
        """Let a batch wait."""
        self._batches.setdefault((entry.iteration, entry.share), {})[entry] = None
        self.count += 1
        if self.count > self._full:
            gone = [old for group in self._batches.values() for old in group if old.is_gone]
            for old in gone[:-READ_AHEAD]:
                self.remove(old)
            self._full = 2 * max(READ_AHEAD, self.count)

    def remove(self, entry: LoadedBatch) -> None:
        """Take a batch out, if it waits."""
        group = self._batches.get((entry.iteration, entry.share), {})
        if entry in group:
            del group[entry]
            self.count -= 1
            if not group:
                del self._batches[entry.iteration, entry.share]

    def take(self, is_meant: Callable[[LoadedBatch], bool]) -> list[LoadedBatch]:
        """Remove those that are meant, and return them."""
        taken = [entry for group in self._batches.values() for entry in group if is_meant(entry)]
        for entry in taken:
            self.remove(entry)
        return taken

    def clear(self) -> None:
        """Take all out."""
        self._batches.clear()
        self.count = 0


class BatchMemory:
    """Which batch the memory of a tensor belongs to, as long as that memory is there."""

    def __init__(self) -> None:
        self._places: dict[int, dict[tuple[int, int], tuple[StorageWeakRef, LoadedBatch]]] = {}
        """By storage: from the first byte of a tensor to behind its last, the batch it belongs to."""

        self._full = 1024

    def place(self, tensor: Tensor, entry: LoadedBatch) -> None:
        """Note that a tensor belongs to a batch; of memory that two batches share, the later one is recognised."""
        if (storage := _storage(tensor)) is None:
            return
        reference, span = StorageWeakRef(storage), _span(tensor)
        entry.memory.append(reference)
        places = self._places.setdefault(storage._cdata, {})
        places.pop(span, None)  # the latest comes last
        places[span] = reference, entry
        if len(self._places) > self._full:
            self._let_go()

    def batches_of(self, inputs: Any) -> list[LoadedBatch]:
        """Return the batches in whose memory tensors begin, in the order of the tensors."""
        recognised: dict[LoadedBatch, None] = {}
        for tensor in tensors_in(inputs):
            storage = _storage(tensor)
            places = None if storage is None else self._places.get(storage._cdata)
            entry = None if places is None else _owner(places, _span(tensor))
            if entry is not None:
                recognised[entry] = None
        return list(recognised)

    def _let_go(self) -> None:
        """Forget memory that is gone."""
        for key, places in list(self._places.items()):
            if all(reference.expired() for reference, _ in places.values()):
                del self._places[key]
        self._full = max(1024, 2 * len(self._places))


def _owner(
    places: dict[tuple[int, int], tuple[StorageWeakRef, LoadedBatch]], span: tuple[int, int]
) -> LoadedBatch | None:
    """Return the batch that was given out last with memory in which a tensor begins."""
    exact = places.get(span)
    if exact is not None and not exact[0].expired():
        return exact[1]
    for (first, behind), (reference, entry) in reversed(places.items()):
        if first <= span[0] < behind and not reference.expired():
            return entry
    return None


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    if tensor.layout is not torch.strided:
        return None
    try:
        return tensor.untyped_storage()
    except RuntimeError:  # a wrapper of torch.func, or a subclass without memory of its own
        return None


def _span(tensor: Tensor) -> tuple[int, int]:
    try:
        start = tensor.data_ptr()
    except RuntimeError:  # fake tensors have no memory
        start = 0
    # The bytes between the first and the last element; a tensor without elements still has a place.
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + max(last + 1, 1) * tensor.element_size()


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists, mappings, dataclasses, and whatever torch knows as a pytree."""
    if isinstance(tree, Tensor):
        yield tree
        return
    if type(tree) in (tuple, list, dict):  # what most are, without torch's registry
        for part in tree.values() if type(tree) is dict else tree:
            yield from tensors_in(part)
        return
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from tensors_in([getattr(leaf, part.name, None) for part in fields(leaf)])
        elif isinstance(leaf, Mapping):
            yield from tensors_in(list(leaf.values()))
