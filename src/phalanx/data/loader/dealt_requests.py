"""`dealt_requests`: the batches of an epoch that a worker is dealt, where workers come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

from phalanx.data.sampling.order import BatchRequest, EpochOrder, SampleOrder
from phalanx.data.sampling.ranks import DataShard


class Dealer(Protocol):
    """Who has the batches; `phalanx.ps.client.batch_dealer.BatchDealer` is one."""

    def number_loader(self) -> int:
        """Return the number of another loader."""
        ...

    def deal(self, loader: int, epoch: int, total: int, count: int, *, is_begun: bool) -> list[tuple[int, int]]:
        """Return the next batches of an epoch as (epoch, number); none when all of it was dealt."""
        ...

    def begin(self, loader: int, epoch: int, number: int) -> None:
        """Say that a batch is computed on next."""
        ...


def dealt_requests(
    order: EpochOrder,
    global_batch: Callable[[int], int],
    deal: Callable[[int, int], list[tuple[int, int]]],
    epoch: int,
    count: int,
) -> Iterator[BatchRequest]:
    """Yield the requests of batches as this worker is dealt them. A batch is one worker's part of a global batch.

    Args:
        order: Of the epoch.
        global_batch: Rows of a global batch for a number of parts.
        deal: Returns the next batches of an epoch of so many, as (epoch, number); of an earlier one where some are
            left, none when all were dealt.
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

    while batches := deal(epoch, total):
        for of_epoch, number in batches:
            yield replace(request_of(of_epoch, number), dealt=(of_epoch, number))
