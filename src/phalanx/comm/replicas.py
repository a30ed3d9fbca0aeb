"""`Replicas`: assignment of logical replicas (shares of a global batch) to ranks, and the replica being computed.

A global batch is split over a fixed number of logical replicas, whatever the number of ranks; each rank holds a run of
adjacent ones and computes them in turn. A replica's turn starts from the same parameters, buffers and random numbers on
any rank, and its gradients are added up in one fixed tree (`replica_sums`): the result has the same bits on any number
of ranks. Li et al., "EasyScale: Elastic Training with Consistent Accuracy", SC 2023, call them EasyScaleThreads.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType

import numpy as np
import torch

from phalanx.errors import ConfigError


def assign_replicas(count: int, ranks: int) -> tuple[range, ...]:
    """Return the replicas that each rank holds: runs whose lengths differ by at most 1, the longer ones first.

    Args:
        count: Logical replicas.
        ranks: Ranks that read their own samples.

    Raises:
        ConfigError: If there are fewer replicas than ranks.
    """
    if count < ranks:
        raise ConfigError(
            f"{count} logical replicas were asked for and {ranks} ranks read samples of their own, so "
            f"{ranks - count} of them would have none. Ask for at least {ranks}, or start fewer ranks."
        )
    each, longer = divmod(count, ranks)
    stops = [(rank + 1) * each + min(rank + 1, longer) for rank in range(ranks)]
    return tuple(range(start, stop) for start, stop in zip([0, *stops], stops, strict=False))


@dataclass(frozen=True, slots=True)
class ReplicaTurn:
    """One replica's part of one global batch."""

    replica: int
    seed: int
    """Where the random numbers of its computation start, 0 to 2**64 - 1."""


class Replicas:
    """The logical replicas of a job, those that this rank holds, and whose turn it is.

    Args:
        assignment: The replicas of each rank, in the order of the ranks.
        rank: Which of them is this one.
        uses_cuda: Whether random numbers are drawn on a GPU too.
    """

    def __init__(self, assignment: tuple[range, ...], rank: int, *, uses_cuda: bool = False) -> None:
        self.assignment = assignment
        """The replicas of each rank now."""

        self._rank = rank
        self._next: tuple[range, ...] | None = None
        self._pins = 0
        self._uses_cuda = uses_cuda
        self._turn: ReplicaTurn | None = None
        self._listeners: list[weakref.WeakMethod[Callable[[int], None]]] = []
        self.on_gradients: Callable[[], None] | None = None
        """Called when the first gradient of a turn comes."""

    @property
    def local(self) -> range:
        """The replicas of this rank, in the order of their turns."""
        return self.assignment[self._rank]

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

    def _take(self) -> None:
        if self._next is not None and not self._pins:
            self.assignment, self._next = self._next, None

    @property
    def count(self) -> int:
        """Number of logical replicas."""
        return self.assignment[-1].stop

    @property
    def current(self) -> int | None:
        """The replica whose turn it is; None before the first batch."""
        return None if self._turn is None else self._turn.replica

    @property
    def is_last(self) -> bool:
        """Whether the replica whose turn it is completes this rank's part of the global batch."""
        return self.current == self.local[-1]

    def on_turn(self, listener: Callable[[int], None]) -> None:
        """Call a method with the replica at the start of each turn, as long as its object lives."""
        assert isinstance(listener, MethodType)
        self._listeners.append(weakref.WeakMethod(listener))

    def begin(self, turn: ReplicaTurn) -> None:
        """Start a turn: tell the listeners, and start the random numbers of torch, NumPy and `random`."""
        if turn is self._turn:
            return
        self._turn = turn
        for reference in self._listeners:
            if (listener := reference()) is not None:
                listener(turn.replica)
        torch.default_generator.manual_seed(turn.seed)
        if self._uses_cuda:
            torch.cuda.manual_seed(turn.seed)
        random.seed(turn.seed)
        np.random.seed(turn.seed & 0xFFFFFFFF)
