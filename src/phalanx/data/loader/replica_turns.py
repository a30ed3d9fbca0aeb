"""`replica_turns`, `elastic_turns`: the batches of this rank's logical replicas, each with its turn."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias

from phalanx.comm.batch.loaded_batches import Iteration
from phalanx.comm.batch.replicas import Replicas, ReplicaTurn
from phalanx.comm.context import BatchShare
from phalanx.data.sampling.shuffle import mixed_seed

if TYPE_CHECKING:
    from phalanx.data.loader.loader import ShardedLoader
    from phalanx.data.loader.options import LoaderOptions

_TURN = 1
"""Tells random numbers of a replica's computation from those of loading a batch."""

Loaded: TypeAlias = tuple[Any, BatchShare, int]
"""A batch, its share, and the position of the epoch after its global batch."""

Turns: TypeAlias = Iterator[tuple[ReplicaTurn, Loaded]]


def replica_turns(
    batches: Iterator[Loaded], options: LoaderOptions, replicas: Replicas, epoch: int, iteration: Iteration
) -> Turns:
    """Yield batches with the turns of the replicas that compute on them."""
    with options.pinned(replicas):
        for before in count():
            left = None if iteration.rounds is None else max(iteration.rounds - before, 0)
            for index, replica in enumerate(replicas.local):  # looked up for each global batch
                loaded = next(batches, None)
                if loaded is None:
                    return
                yield _turn(options, epoch, index, replica, loaded, iteration, left)


def elastic_turns(loader: ShardedLoader, options: LoaderOptions, replicas: Replicas, iteration: Iteration) -> Turns:
    """Yield batches as `replica_turns` does while ranks leave and join. Collective as the updates are.

    Where a rank was lost, the batches of replicas that this rank takes over follow in the same global batch, loaded in
    this process; then batches are requested anew. A rank that joins begins at the position of the others.
    """
    epoch, revision = loader.epoch, -1
    batches: Iterator[Loaded] = iter(())
    while True:
        before = loader.position
        replicas.start_round()
        if loader.epoch != epoch:  # this rank has joined, in a later epoch
            return
        first = loader.position
        if first != before:  # it has joined, in this epoch
            loader.set_epoch(epoch + 1)
        if revision != replicas.revision:
            revision, batches = replicas.revision, options.batches(epoch, first)
        own = len(replicas.local)
        for index in count():
            if index >= len(replicas.local):
                break
            replica = replicas.local[index]
            loaded = next(batches, None) if index < own else options.batch_of(epoch, first, replica, replicas.count)
            if loaded is None:
                return
            loader.position = loaded[2]
            yield _turn(options, epoch, index, replica, loaded, iteration)


def _turn(
    options: LoaderOptions,
    epoch: int,
    index: int,
    replica: int,
    loaded: Loaded,
    iteration: Iteration,
    rounds_left: int | None = None,
) -> tuple[ReplicaTurn, Loaded]:
    seed = mixed_seed(options.seed(), epoch, loaded[2], replica, _TURN)
    return ReplicaTurn(replica, seed, index, iteration, rounds_left, (epoch, loaded[2])), loaded
