"""`Replicas`: assignment of logical replicas (shares of a global batch) to ranks, and the replica being computed.

A global batch is split over a fixed number of logical replicas, whatever the number of ranks; each rank holds a run of
adjacent ones and computes them in turn. A replica's turn starts from the same parameters, buffers and random numbers on
any rank, and its gradients are added up in one fixed tree (`replica_sums`): the result has the same bits on any number
of ranks. Li et al., "EasyScale: Elastic Training with Consistent Accuracy", SC 2023, call them EasyScaleThreads.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from types import MethodType
from typing import TYPE_CHECKING

from phalanx.comm.batch.random_streams import RandomStreams
from phalanx.comm.batch.update_group import UpdateGroup
from phalanx.comm.local.random_state import seed_all
from phalanx.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from phalanx.comm.batch.loaded_batches import Iteration


logger = logging.getLogger("phalanx.comm")

LEAVE_BY_UPDATES = (
    "Count updates, not batches: updates += px.has_updated(optimizer), and break at a number of those; or start as "
    "many ranks as there are replicas, or a number that divides theirs."
)
"""What to do where a loop leaves an epoch."""


def assign_replicas(count: int, ranks: int, shares: Sequence[int] | None = None) -> tuple[range, ...]:
    """Return the replicas that each rank holds: runs whose lengths differ by at most 1, the longer ones first.

    Args:
        count: Logical replicas.
        ranks: Ranks that read their own samples.
        shares: How many each rank holds instead.

    Raises:
        ConfigError: If there are fewer replicas than ranks.
    """
    if count < ranks:
        raise ConfigError(
            f"{count} logical replicas were asked for and {ranks} ranks read samples of their own, so "
            f"{ranks - count} of them would have none. Ask for at least {ranks}, or start fewer ranks."
        )
    each, longer = divmod(count, ranks)
    stops = list(accumulate(shares or (each + (rank < longer) for rank in range(ranks))))
    return tuple(range(start, stop) for start, stop in zip([0, *stops], stops, strict=False))


@dataclass(frozen=True, slots=True)
class ReplicaTurn:
    """One replica's part of one global batch."""

    replica: int
    seed: int
    """Where the random numbers of its computation start, 0 to 2**64 - 1."""

    index: int = 0
    """Which of this rank's turns of the global batch it is. A replica may have two, where a rank was lost."""

    iteration: Iteration | None = None
    """The pass over a loader that it belongs to."""

    rounds_left: int | None = None
    """Global batches of the pass, from its own on; None where that is not known."""

    place: tuple[int, int] = (0, 0)
    """Its epoch, and the position in that behind its global batch: the same for all replicas."""


@dataclass(slots=True)
class LabelMean:
    """The loss of a turn as a mean over labels."""

    weight: Tensor
    """Of the labels of the turn."""

    scale: float
    """What the sum of its losses was divided by instead: the same for all replicas of a global batch."""

    is_checked: bool = False
    """Whether the loss is known to have no other terms."""


@dataclass(slots=True)
class TurnProgress:
    """What the loop has done in a turn until now."""

    has_gradients: bool = False
    """Whether a backward pass has run."""

    has_stepped: bool = False
    """Whether an optimizer's step was called; in an elastic job, on this batch."""

    is_over: bool = False
    """Whether the parameters were updated: what is computed on the same batch again is another turn."""

    label_mean: LabelMean | None = None
    """Its loss, where that is a mean over labels."""


class Replicas:
    """The logical replicas of a job, those that this rank holds, and whose turn it is.

    Args:
        assignment: The replicas of each rank, in the order of the ranks.
        rank: Which of them is this one.
        device: What computes, whose random numbers are seeded beside those of the CPU.
        is_elastic: Whether ranks may leave and join, so that any rank may come to hold several replicas.
    """

    def __init__(
        self, assignment: tuple[range, ...], rank: int, *, device: torch.device | None = None, is_elastic: bool = False
    ) -> None:
        self.assignment = assignment
        """The replicas of each rank now."""

        self.first_assignment = assignment
        """Those of each rank when it was made."""

        self.is_elastic = is_elastic
        self.revision = 0
        """How often the replicas of this rank changed because ranks left or joined."""

        self._set_by_rank(assignment, rank)
        self._next: tuple[range, ...] | None = None
        self._pins = 0
        self._device = device
        self._turn: ReplicaTurn | None = None
        self.progress = TurnProgress()
        """What was done in the turn that is on, or was on last."""

        self.is_round_open = False
        """Whether gradients of the global batch at hand were computed and the parameters not updated."""

        self.group = UpdateGroup()
        """The global batches of the update that comes."""

        self.is_in_no_sync = False
        """Whether the loop is inside `px.no_sync`."""

        self.labels_per_row: int | None = None
        """What `LabelMean.scale` has for each row of a global batch, in `px.train_step`: the same for the whole job."""

        self.streams: RandomStreams | None = None
        """Random numbers of the replicas of this rank, where each was a rank of a run without replicas: they continue
        as that rank's did. Seeded anew at each turn when None."""

        self.left_at = ""
        """File and line at which the loop left the last pass over a loader that it left; empty if none."""

        self._listeners: list[weakref.WeakMethod[Callable[[int, bool], None]]] = []
        self.on_round_start: Callable[[], None] | None = None
        """Called on every rank before its first batch of each global batch."""

    def _set_by_rank(self, by_rank: tuple[Sequence[int], ...], rank: int) -> None:
        self._rank = rank
        self.by_rank = by_rank
        """The replicas of each rank in the global batch at hand: the assignment, or more where a rank was lost."""

        self.local = by_rank[rank]
        """The replicas of this rank in the global batch at hand, in the order of their turns."""

    def take_over(self, by_rank: tuple[Sequence[int], ...], rank: int) -> None:
        """Let the ranks that are left compute the lost ranks' replicas of the global batch at hand.

        Args:
            by_rank: The replicas of each rank that is left, those that it has computed first.
            rank: Which of them is this one.
        """
        self._set_by_rank(by_rank, rank)
        self.revision += 1

    def reassign(self, assignment: tuple[range, ...], rank: int) -> None:
        """Assign replicas to other ranks, from the next global batch on: ranks left or joined."""
        self.assignment, self._next = assignment, None
        self._set_by_rank(assignment, rank)
        self.revision += 1

    def start_round(self) -> None:
        """Begin a global batch: before its first batch is loaded."""
        if self.on_round_start is not None:
            self.on_round_start()

    def move(self, assignment: tuple[range, ...]) -> None:
        """Give the ranks other replicas: before the next global batch, or the next epoch while batches are read ahead.

        Every rank calls it between the same two updates.
        """
        self._next = assignment
        self._take()

    def pin(self) -> None:
        """Leave replicas where they are: from now on batches are requested ahead of their turns."""
        self._pins += 1

    def unpin(self) -> None:
        """End what `pin` began."""
        self._pins -= 1
        self._take()

    @property
    def is_moving(self) -> bool:
        """Whether a move waits for the end of an epoch."""
        return self._next is not None

    def _take(self) -> None:
        if self._next is not None and not self._pins:
            self.assignment, self._next = self._next, None
            self._set_by_rank(self.assignment, self._rank)

    @property
    def count(self) -> int:
        """Number of logical replicas."""
        return self.assignment[-1].stop

    @property
    def current(self) -> int | None:
        """The replica whose turn it is; None before the first batch."""
        return None if self._turn is None else self._turn.replica

    @property
    def is_first(self) -> bool:
        """Whether it is the first turn of this rank in the global batch."""
        return self._turn is not None and self._turn.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the turn completes this rank's part of the global batch."""
        return self._turn is not None and self._turn.index == len(self.local) - 1

    @property
    def are_shared(self) -> bool:
        """Whether some rank holds several replicas, or may come to."""
        return self.is_elastic or self.count > len(self.assignment)

    @property
    def are_uneven(self) -> bool:
        """Whether ranks hold different numbers of replicas, so that a loop's body runs differently often on them."""
        return len({len(local) for local in self.by_rank}) > 1

    @property
    def were_ranks(self) -> bool:
        """Whether each was a rank of a run without replicas, which continues with as few differences as can be."""
        return self.streams is not None

    def on_turn(self, listener: Callable[[int, bool], None]) -> None:
        """Call a method at the start of each turn, as long as its object lives.

        Args:
            listener: Gets the replica, and whether the turn before belonged to the same pass over a loader.
        """
        assert isinstance(listener, MethodType)
        self._listeners.append(weakref.WeakMethod(listener))

    def begin(self, turn: ReplicaTurn) -> None:
        """Start a turn: tell the listeners, and start the random numbers of torch, NumPy and `random`.

        A batch of another loader for the same replica, before any gradient, starts the random numbers only.
        """
        last = self.progress
        if turn is self._turn and not last.is_over:
            return
        is_other = self._turn is None or last.is_over or last.has_gradients or self._turn.index != turn.index
        before, self._turn = self._turn, turn
        if is_other:
            # Others could not compute on the batch of an elastic job again.
            self.progress = TurnProgress(has_stepped=self.is_elastic and turn is before)
            is_continued = before is not None and before.iteration is turn.iteration
            is_left = before is not None and before.iteration is not None and before.iteration.is_over
            if self.group.is_over or is_left:
                self.group = UpdateGroup()
            if not self.group.turns:
                self.group.left = turn.rounds_left
            for reference in self._listeners:
                if (listener := reference()) is not None:
                    listener(turn.replica, is_continued)
        if self.streams is None:
            seed_all(turn.seed, device=self._device)
        else:
            self.streams.switch(turn.replica)

    def begin_backward(self) -> None:
        """Note that a backward pass runs in this turn."""
        if not self.progress.has_gradients:
            self.group.turns += 1
            self.group.rounds += self.is_last
        self.progress.has_gradients = self.is_round_open = True

    def end_round(self) -> None:
        """Note that the parameters are updated now: what is computed on the same batch again is another turn."""
        self.progress.is_over, self.is_round_open, self.group.is_over = True, False, True

    @property
    def is_update_due(self) -> bool:
        """Whether this turn completes this rank's part of the update that comes, as far as replicas are concerned."""
        return len(self.local) == 1 or (self.is_last and (self.is_elastic or self.group.is_complete))

    @property
    def is_deferred(self) -> bool:
        """Whether the gradients of this turn wait for the last global batch of the group, to be added up with its own.

        Only of a rank that holds several replicas: for its loop `px.no_sync` ends after other batches.
        """
        group = self.group
        return group.defers and group.size != group.rounds + (not (self.progress.has_gradients and self.is_last))

    @property
    def turn(self) -> ReplicaTurn | None:
        """The turn that is on; None before the first batch."""
        return self._turn

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let the gradients of the group that begins inside the block be added up over replicas at its end only."""
        before, self.is_in_no_sync = self.is_in_no_sync, True
        try:
            yield
        finally:
            self.is_in_no_sync = before

    def leave_pass(self, iteration: Iteration) -> None:
        """Note that the loop left a pass over a loader before its end; say so if other ranks cannot have left there."""
        turn, self.left_at = self._turn, iteration.left_at
        if self.is_elastic or not self.are_uneven or turn is None or turn.iteration is not iteration:
            return
        if self.is_round_open and not self.is_last:
            logger.error(
                "the loop left an epoch%s inside a global batch, after %d of this rank's %d logical replicas, while "
                "other ranks hold other numbers of them and do not leave there. %s",
                f" at {iteration.left_at}" if iteration.left_at else "",
                turn.index + 1,
                len(self.local),
                LEAVE_BY_UPDATES,
            )

    def end_pass(self, seed: int) -> None:
        """Note that a pass over a loader is over: no replica's turn is on, and all ranks draw the same numbers."""
        self._turn, self.progress.is_over = None, False
        if self.group.is_open:
            self.group.spans_epochs = True
        if self.streams is None:
            seed_all(seed, device=self._device)
