"""`Batches`: tells which loader batch a forward pass is computed on, by the memory of its tensors.

A loop may read ahead, read several loaders in turn or list a loader, so the batch given out last need not be the batch
that is computed on. Each batch is registered with the memory its tensors lie in. Inputs of a model that lie there, as
views do, are of that batch. Of other inputs (`x.float()`, noise, augmented copies) only candidates are known: the
batches given out that nothing was computed on yet, and the batch computed on last until the next is given out. Where
these are several, the loop reads ahead, and what holds for the whole epoch holds for each of its batches: a batch that
weighs differently at its end is refused at the beginning.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from phalanx.comm.batch.input_time import input_time
from phalanx.comm.batch.replicas import Replicas, ReplicaTurn
from phalanx.comm.local.script_line import script_line
from phalanx.errors import ConfigError

LoadedT = TypeVar("LoadedT")

READ_AHEAD = 64
"""Batches, of which nothing is left, that may wait to be computed on; a loop that reads further ahead keeps them."""


@dataclass(frozen=True, slots=True)
class BatchShare:
    """How much of the current global batch this rank holds."""

    rows: int
    """Rows of this rank's batch that count; 0 for a batch that only keeps the ranks in step."""

    global_rows: int
    """Rows of the whole global batch, over all ranks."""

    @property
    def weight(self) -> float:
        """Weight of this rank's mean gradient in the gradient of the global mean; the ranks' weights add up to 1."""
        return self.rows / self.global_rows


Shares = tuple[BatchShare, ...]
"""What a computation may be of: a single share when its batch is known, none when every rank weighs the same."""


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


class BatchClock(Protocol):
    """Measures the batches of this process."""

    def begin_batch(self) -> None:
        """Note that a loop asks for a batch."""

    def end_input(self, rows: int | None) -> None:
        """Note that the loader has it, with how many rows; None if there is none left."""


@dataclass(eq=False, slots=True)
class _LoadedBatch:
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


class Batches:
    """The batches that the loaders of this process gave out, and the batch in hand."""

    def __init__(self) -> None:
        self.replicas: Replicas | None = None
        """Whose turns begin with their batches; None without logical replicas."""

        self.clock: weakref.ref[BatchClock] | None = None
        """Measures batches to train on, while it lives."""

        self.in_hand: BatchShare | None = None
        """Share of the batch that was computed on last, or given out since; None between two epochs."""

        self.trained = 0
        """Batches to train on that were given out."""

        self.passes = 0
        """Passes over loaders of such batches that began."""

        self._waiting = _Waiting()
        self._passed = _Waiting()
        """Batches of which nothing is left and that a script seems to have looked at only, for statistics say. It may
        have kept copies: what is computed on while no loader gives out batches may be of them."""

        self._current: _LoadedBatch | None = None
        """The training batch computed on last, if none was given out since."""

        self._named: _LoadedBatch | None = None
        """What `use` named, likewise."""

        self._is_evaluating = False
        """Whether the batch given out last is not one to train on."""

        self._before_evaluation: BatchShare | None = None
        """What was in hand before it."""

        self._places: dict[int, dict[tuple[int, int], tuple[StorageWeakRef, _LoadedBatch]]] = {}
        """By storage: from the first byte of a tensor to behind its last, the batch it belongs to."""

        self._full = 1024
        self._count = 0
        self._used: list[_LoadedBatch] = []
        """The training batches that were recognised in forward passes since the last backward pass."""

    @property
    def is_training(self) -> bool:
        """Whether the batch in hand is one to train on."""
        return self.in_hand is not None and not self._is_evaluating

    # -- loaders -------------------------------------------------------------------------------------------------

    def begin(
        self, *, is_training: bool, shares: Shares = (), is_resumed: bool = False, rounds: int | None = None
    ) -> Iteration:
        """Return what the batches of one pass over a loader are given out under.

        Args:
            is_training: Whether they are to be trained on.
            shares: What they may be, as far as that is known.
            is_resumed: Whether the pass begins inside an epoch.
            rounds: Its global batches, where that is known.
        """
        if is_training:
            self.passes += 1
            # A pass over the data that computed nothing, for statistics say, has no batch that is yet to come. What is
            # left of a resumed epoch nobody takes statistics of.
            self._pass_by(
                lambda batch: (
                    batch.is_gone
                    and batch.iteration.is_over
                    and not batch.iteration.is_used
                    and not batch.iteration.is_resumed
                )
            )
        return Iteration(is_training, shares, is_resumed, rounds)

    def time_batches(self, loaded: Iterator[LoadedT], rows_of: Callable[[LoadedT], int]) -> Iterator[LoadedT]:
        """Yield what a loader loads to train on, and tell the clock when each batch is asked for and is there."""
        while True:
            clock = None if self.clock is None else self.clock()
            if clock is not None:
                clock.begin_batch()
            try:
                with input_time:
                    batch = next(loaded)
            except StopIteration:
                if clock is not None:
                    clock.end_input(None)
                return
            if clock is not None:
                clock.end_input(rows_of(batch))
            yield batch

    def give(self, batch: Any, share: BatchShare, iteration: Iteration, turn: ReplicaTurn | None = None) -> None:
        """Register a batch that is given out now; the turn of its replica begins."""
        self._count += 1
        entry = _LoadedBatch(share, iteration, self._count, turn)
        for tensor in tensors_in(batch):
            self._place(tensor, entry)
        iteration.count += 1
        if not iteration.is_training and not self._is_evaluating:
            self._before_evaluation = self.in_hand
        self.in_hand, self._is_evaluating = share, not iteration.is_training
        if iteration.is_training:
            self.trained += 1
            self._current = self._named = None
            self._waiting.add(entry)
            self._begin_turn(entry)

    def end(self, iteration: Iteration, *, is_complete: bool) -> None:
        """Note that a pass over a loader is over. What comes is of no batch, save those that wait.

        What was in hand before an evaluation is in hand again.

        Args:
            iteration: The pass.
            is_complete: Whether it came to its end, or the script left it.
        """
        iteration.is_over = True
        if not iteration.is_training:
            if self._is_evaluating:
                self.in_hand, self._is_evaluating = self._before_evaluation, False
            return
        if is_complete:
            self.in_hand = self._current = self._named = None
            return
        iteration.left_at = script_line()
        if self.replicas is not None:
            self.replicas.leave_pass(iteration)
        # `next(iter(loader))` looks at a batch; what a script left is not computed on, unless it keeps it.
        is_look = iteration.count == 1
        self._pass_by(lambda entry: entry.iteration is iteration and (is_look or entry.is_gone))

    @property
    def is_reading_ahead(self) -> bool:
        """Whether batches wait to be computed on."""
        return self._waiting.count > 0

    # -- computations --------------------------------------------------------------------------------------------

    def use(self, batch: Any) -> bool:
        """Say that what comes, until the next training batch is given out, is computed on a batch or on a part of it.

        Returns:
            Whether a loader gave it out.
        """
        recognised = self._recognise(batch)
        if len(recognised) != 1:
            return False
        self._use(recognised[0])
        self._named = recognised[0]
        return True

    def resolve(self, inputs: Any, *, is_training: bool) -> Shares:
        """Return what inputs of a computation may be of, and note that it is computed on.

        Args:
            inputs: Anything with tensors in it.
            is_training: Whether gradients will be asked for.
        """
        recognised = self._recognise(inputs)
        for entry in recognised:
            self._use(entry)
        shares = tuple(dict.fromkeys(entry.share for entry in recognised))
        if not shares and (is_training or not self._is_evaluating):
            shares = self._of_unknown()
        if not shares:
            return () if self.in_hand is None else (self.in_hand,)
        if self.in_hand not in shares:
            self.in_hand = shares[0]
        return shares

    def to_come(self) -> Shares:
        """Return what the next computation may be of, unless its inputs tell."""
        if self._named is not None:
            return (self._named.share,)
        if self._current is None:
            return self._waiting.shares
        return tuple(dict.fromkeys((self._current.share, *self._waiting.shares)))

    def _of_unknown(self) -> Shares:
        """Return what a computation is of whose inputs do not tell, and note that it is computed on."""
        if self._named is not None:
            return (self._named.share,)
        if self._current is not None:
            if not self._waiting.count:
                return (self._current.share,)
            return tuple(dict.fromkeys((self._current.share, *self._current.iteration.shares, *self._waiting.epochs)))
        only = self._waiting.only
        if only is not None and not only.iteration.is_over:
            self._passed.clear()  # this loop takes batch after batch, and did look only at those before
        elif self._waiting.count + self._passed.count > 1:
            return tuple(dict.fromkeys((*self._waiting.epochs, *self._passed.epochs)))
        else:
            only = only or self._passed.only
        if only is None:
            return ()
        self._use(only)
        return (only.share,)

    def overlooked(self) -> Shares:
        """Return what the next backward pass may be of beside the forward passes that were seen.

        Of batches of two loaders one may have come to a method other than `forward`: it was given out before those that
        were seen, is there still, and no batch of its loader was seen.
        """
        if not self._used or self._named is not None:
            return ()
        last, seen = max(entry.number for entry in self._used), {entry.iteration for entry in self._used}
        return self._waiting.shares_where(
            lambda entry: entry.number < last and entry.iteration not in seen and not entry.is_gone
        )

    def end_backward(self) -> None:
        """Note that a backward pass is over."""
        self._used.clear()

    def _use(self, entry: _LoadedBatch) -> None:
        entry.iteration.is_used = True
        self.in_hand = entry.share
        if entry.iteration.is_training:
            self._begin_turn(entry)
            self._current = entry
            self._used.append(entry)
            self._waiting.remove(entry)
            self._passed.remove(entry)

    def _begin_turn(self, entry: _LoadedBatch) -> None:
        if entry.turn is not None and self.replicas is not None:
            self.replicas.begin(entry.turn)

    def _pass_by(self, is_meant: Callable[[_LoadedBatch], bool]) -> None:
        for entry in self._waiting.take(is_meant):
            self._passed.add(entry)

    # -- memory --------------------------------------------------------------------------------------------------

    def _place(self, tensor: Tensor, entry: _LoadedBatch) -> None:
        if (storage := _storage(tensor)) is None:
            return
        reference, span = StorageWeakRef(storage), _span(tensor)
        entry.memory.append(reference)
        places = self._places.setdefault(storage._cdata, {})
        places.pop(span, None)  # the latest comes last
        places[span] = reference, entry
        if len(self._places) > self._full:
            self._let_go()

    def _recognise(self, inputs: Any) -> list[_LoadedBatch]:
        recognised: dict[_LoadedBatch, None] = {}
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


class _Waiting:
    """Training batches that nothing was computed on yet, by pass and share: an epoch has few different."""

    def __init__(self) -> None:
        self._batches: dict[tuple[Iteration, BatchShare], dict[_LoadedBatch, None]] = {}
        self.count = 0
        self._full = 2 * READ_AHEAD

    @property
    def shares(self) -> Shares:
        return tuple({share: None for _, share in self._batches})

    @property
    def epochs(self) -> Shares:
        """All that the epochs they are of hold: what was not given out yet is to be as well known as what was."""
        return tuple({share: None for iteration, own in self._batches for share in (own, *iteration.shares)})

    def shares_where(self, is_meant: Callable[[_LoadedBatch], bool]) -> Shares:
        return tuple({share: None for (_, share), group in self._batches.items() if any(map(is_meant, group))})

    @property
    def only(self) -> _LoadedBatch | None:
        """The batch that waits, if it is alone."""
        return next(iter(next(iter(self._batches.values())))) if self.count == 1 else None

    def add(self, entry: _LoadedBatch) -> None:
        self._batches.setdefault((entry.iteration, entry.share), {})[entry] = None
        self.count += 1
        if self.count > self._full:
            gone = [old for group in self._batches.values() for old in group if old.is_gone]
            for old in gone[:-READ_AHEAD]:
                self.remove(old)
            self._full = 2 * max(READ_AHEAD, self.count)

    def remove(self, entry: _LoadedBatch) -> None:
        group = self._batches.get((entry.iteration, entry.share), {})
        if entry in group:
            del group[entry]
            self.count -= 1
            if not group:
                del self._batches[entry.iteration, entry.share]

    def take(self, is_meant: Callable[[_LoadedBatch], bool]) -> list[_LoadedBatch]:
        """Remove those that are meant, and return them."""
        taken = [entry for group in self._batches.values() for entry in group if is_meant(entry)]
        for entry in taken:
            self.remove(entry)
        return taken

    def clear(self) -> None:
        self._batches.clear()
        self.count = 0


def _owner(
    places: dict[tuple[int, int], tuple[StorageWeakRef, _LoadedBatch]], span: tuple[int, int]
) -> _LoadedBatch | None:
    """Return the batch that was given out last with memory in which a tensor begins."""
    exact = places.get(span)
    if exact is not None and not exact[0].expired():
        return exact[1]
    for (first, behind), (reference, entry) in reversed(places.items()):
        if first <= span[0] < behind and not reference.expired():
            return entry
    return None


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


def row_weight_of(shares: Shares, ranks: int, *, is_sum: bool = False) -> float:
    """Return the factor of this rank's gradients, of which the mean over the ranks is then taken.

    Args:
        shares: What the gradients may be of.
        ranks: Number of ranks that read rows of their own.
        is_sum: Whether gradients are summed over the ranks, so that only a batch that does not count weighs less.

    Returns:
        1 for an even share, 0 for a batch that does not count.

    Raises:
        ConfigError: If the candidates weigh differently.
    """
    if not shares:
        return 1.0
    if not weigh_alike(shares, ranks, is_sum=is_sum):
        rows = " or ".join(str(share.global_rows) for share in shares)
        raise ConfigError(
            f"a gradient is of a batch of {rows} rows, which weigh differently on {ranks} ranks, and which cannot be "
            "known: the model's inputs are not the tensors that a loader gave out, and several batches of an epoch "
            "that has such were given out before it was called. Call px.use_batch(batch) before the forward pass, "
            "with what the loader gave, or let all batches be even: drop_last=True, and a global batch that the ranks "
            "divide."
        )
    return float(shares[0].rows > 0) if is_sum else shares[0].weight * ranks


def weigh_alike(shares: Sequence[BatchShare], ranks: int, *, is_sum: bool = False) -> bool:
    """Return whether batches have one weight on every rank. What is known here alone says so of all ranks."""

    def is_even(share: BatchShare) -> bool:
        return share.global_rows >= ranks and share.rows > 0 if is_sum else share.rows * ranks == share.global_rows

    return len(set(shares)) <= 1 or all(is_even(share) for share in shares)


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
