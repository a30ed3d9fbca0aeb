"""`leased_requests`: the batches of an epoch that a worker leases, where workers come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

from phalanx.data.sampling.order import BatchRequest, EpochOrder, SampleOrder
from phalanx.data.sampling.ranks import DataShard


class BatchSource(Protocol):
    """Who has the batches; `phalanx.ps.client.leased_batches.LeasedBatches` is one."""

    def number_loader(self) -> int:
        """Return the number of another loader."""
        ...

    def lease(self, loader: int, epoch: int, total: int, count: int, *, is_begun: bool) -> list[tuple[int, int]]:
        """Return the next batches of an epoch as (epoch, number); none when all of it was leased."""
        ...

    def begin(self, loader: int, epoch: int, number: int) -> None:
        """Say that a batch is computed on next."""
        ...


def leased_requests(
    order: EpochOrder,
    global_batch: Callable[[int], int],
    lease: Callable[[int, int], list[tuple[int, int]]],
    epoch: int,
    count: int,
) -> Iterator[BatchRequest]:
    """Yield the requests of batches as this worker gets them. A batch is one worker's part of a global batch.

    Args:
        order: Of the epoch.
        global_batch: Rows of a global batch for a number of parts.
        lease: Returns the next batches of an epoch of so many, as (epoch, number); of an earlier one where some are
            left, none when all were leased.
        epoch: Which epoch.
        count: Parts of a global batch, one for each worker that there may be.
    """
    total, is_listed = order.steps(count) * count, not isinstance(order, SampleOrder) or order.sampler is not None
    epochs: dict[int, list[list[BatchRequest]]] = {}

    def request_of(of_epoch: int, number: int) -> BatchRequest:
        step, part = divmod(number, count)
        if is_listed:  # a sampler lists a whole epoch at once
            if of_epoch not in epochs:
                shards = [DataShard(index, count, is_checked=False) for index in range(count)]
                epochs[of_epoch] = [list(order.requests(of_epoch, shard)) for shard in shards]
            return epochs[of_epoch][part][step]
        shard = DataShard(part, count, is_checked=False)
        return next(order.requests(of_epoch, shard, step * global_batch(count)))

    while batches := lease(epoch, total):
        for of_epoch, number in batches:
            yield replace(request_of(of_epoch, number), lease=(of_epoch, number))
