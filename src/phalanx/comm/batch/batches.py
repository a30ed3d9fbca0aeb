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
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

from phalanx.comm.batch.input_time import input_time
from phalanx.comm.batch.loaded_batches import BatchMemory, Iteration, LoadedBatch, WaitingBatches, tensors_in
from phalanx.comm.batch.replicas import Replicas, ReplicaTurn
from phalanx.comm.batch.share import BatchShare, Shares
from phalanx.comm.local.script_line import script_line

LoadedT = TypeVar("LoadedT")


class BatchClock(Protocol):
    """Measures the batches of this process."""

    def begin_batch(self) -> None:
        """Note that a loop asks for a batch."""

    def end_input(self, rows: int | None) -> None:
        """Note that the loader has it, with how many rows; None if there is none left."""


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

        self._waiting = WaitingBatches()
        self._passed = WaitingBatches()
        """Batches of which nothing is left and that a script seems to have looked at only, for statistics say. It may
        have kept copies: what is computed on while no loader gives out batches may be of them."""

        self._current: LoadedBatch | None = None
        """The training batch computed on last, if none was given out since."""

        self._named: LoadedBatch | None = None
        """What `use` named, likewise."""

        self._is_evaluating = False
        """Whether the batch given out last is not one to train on."""

        self._before_evaluation: BatchShare | None = None
        """What was in hand before it."""

        self._memory = BatchMemory()
        self._count = 0
        self._used: list[LoadedBatch] = []
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
        entry = LoadedBatch(share, iteration, self._count, turn)
        for tensor in tensors_in(batch):
            self._memory.place(tensor, entry)
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
        recognised = self._memory.batches_of(batch)
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
        recognised = self._memory.batches_of(inputs)
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

    def _use(self, entry: LoadedBatch) -> None:
        entry.iteration.is_used = True
        self.in_hand = entry.share
        if entry.iteration.is_training:
            self._begin_turn(entry)
            self._current = entry
            self._used.append(entry)
            self._waiting.remove(entry)
            self._passed.remove(entry)

    def _begin_turn(self, entry: LoadedBatch) -> None:
        if entry.turn is not None and self.replicas is not None:
            self.replicas.begin(entry.turn)

    def _pass_by(self, is_meant: Callable[[LoadedBatch], bool]) -> None:
        for entry in self._waiting.take(is_meant):
            self._passed.add(entry)
