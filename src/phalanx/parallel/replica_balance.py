"""`ReplicaBalance`: load balancing of logical replicas: measure time per replica, move replicas to faster ranks.

Which rank computes a replica does not change a bit of the result, so ranks of unequal speed can share a global batch by
their speeds. Seconds are those from the beginning of a replica's turn, when its batch has been read, to its first
gradient: the forward pass and the loss, and no wait for other ranks.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from phalanx.comm.collectives import all_gather
from phalanx.comm.context import Context

logger = logging.getLogger("phalanx.parallel")

EVERY = 20
"""Updates from one look at the speeds to the next."""

GAIN = 0.05
"""Part of a step that a move must win."""


def balance(seconds: Sequence[float], count: int) -> tuple[range, ...]:
    """Return the replicas of each rank such that the slowest rank is done soonest.

    Each rank holds one replica at least. Greedy, which is exact for equal replicas: each further replica goes to the
    rank that would then be done first.

    Args:
        seconds: What a replica takes on each rank, above 0.
        count: Replicas, at least as many as ranks.
    """
    sizes = [1] * len(seconds)
    for _ in range(count - len(seconds)):
        first = min(range(len(seconds)), key=lambda rank: ((sizes[rank] + 1) * seconds[rank], rank))
        sizes[first] += 1
    stops = [sum(sizes[: rank + 1]) for rank in range(len(sizes))]
    return tuple(range(stop - size, stop) for stop, size in zip(stops, sizes, strict=True))


def slowest(seconds: Sequence[float], assignment: Sequence[range]) -> float:
    """Return the seconds of the rank that is done last."""
    return max(each * len(local) for each, local in zip(seconds, assignment, strict=True))


class ReplicaBalance:
    """Measures this rank, and moves replicas between ranks every so many updates. Updates are collective.

    Args:
        context: This process's place in the job, with logical replicas.
    """

    def __init__(self, context: Context) -> None:
        assert context.replicas is not None
        self._context, self._replicas = context, context.replicas
        self._began: float | None = None
        self._seconds: list[float] = []
        self._updates = 0
        self._replicas.on_turn(self._begin_turn)
        self._replicas.on_gradients = self._computed

    def _begin_turn(self, _replica: int, _is_continued: bool) -> None:
        self._began = time.perf_counter()

    def _computed(self) -> None:
        if self._began is not None:
            self._seconds.append(time.perf_counter() - self._began)
            self._began = None

    def updated(self, _optimizer: Optimizer) -> None:
        """Count an update; every so many, look at the speeds of all ranks. Collective then."""
        self._updates += 1
        if self._updates % EVERY == 0:
            self._look()

    def _look(self) -> None:
        is_known = self._seconds and not self._context.batches.is_reading_ahead
        own = torch.tensor([statistics.median(self._seconds) if is_known else 0.0], dtype=torch.float64)
        self._seconds.clear()
        seconds = all_gather(own.to(self._context.device), same_shapes=True, group=self._context.readers.group).tolist()
        if not all(value > 0 for value in seconds):
            return
        before, better = self._replicas.assignment, balance(seconds, self._replicas.count)
        now, then = slowest(seconds, before), slowest(seconds, better)
        if then > (1 - GAIN) * now:
            return
        self._replicas.move(better)
        if self._context.rank == 0:
            sizes = ", ".join(f"{len(local)} on rank {rank}" for rank, local in enumerate(better))
            logger.info(
                "replicas move to faster ranks: %s, which saves %.0f %% of a step", sizes, 100 * (1 - then / now)
            )
