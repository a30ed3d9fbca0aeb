"""`PipelineStream`: a data pipeline over an iterable dataset."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import get_worker_info

from phalanx.data.pipeline.columns import transpose, values_of
from phalanx.data.pipeline.order import Ordering
from phalanx.data.pipeline.pipeline import Pipeline
from phalanx.data.sampling.ranks import DataShard
from phalanx.data.sampling.row_rng import Draws
from phalanx.data.sampling.shuffle import mixed_seed
from phalanx.data.sampling.windows import shuffle_stream_windows

Item = tuple[list[Any], int, int]
"""Values by column, the pass, and the sample's index in it."""


class PipelineStream:
    """One epoch of a pipeline over a stream, before it is split into batches.

    Args:
        pipeline: What to read and map.
        ordering: In which order.
        seed: The loader's seed.
        epoch: Which epoch.
        own: The shard, if each rank reads its own stream; None if all ranks share one.
    """

    def __init__(self, pipeline: Pipeline, ordering: Ordering, seed: int, epoch: int, own: DataShard | None) -> None:
        self.pipeline, self.ordering, self.own = pipeline, ordering, own
        self.seed, self.epoch = seed, epoch

    def spans(self) -> Iterator[Iterator[Item]]:
        """Yield the epoch's spans (see `data/pipeline/order.py`), each to be read before the next."""
        for number in range(self.ordering.spans):
            span = self.epoch * self.ordering.spans + number
            passes = (self._rows(span * self.ordering.joined + index) for index in range(self.ordering.joined))
            yield self._units(itertools.chain.from_iterable(passes), span)

    def collate(self, items: list[Item]) -> Any:
        """Return the batch of these samples."""
        values, passes, rows = zip(*items, strict=True)
        numbers, seeds = np.array(rows), np.empty(len(rows), np.uint64)
        for number in set(passes):
            is_in_pass = np.array(passes) == number
            seeds[is_in_pass] = Draws.of_rows(self._own_seed(), number, numbers[is_in_pass]).seeds
        return self.pipeline.finish(transpose(list(values), self.pipeline.names), seeds)

    def _rows(self, number: int) -> Iterator[Item]:
        dataset, names = self.pipeline.dataset, self.pipeline.names
        source = getattr(dataset, "description", type(dataset).__name__)
        items: Iterator[Item] = (
            (values_of(sample, names, row, source), number, row) for row, sample in enumerate(dataset)
        )
        for window in self.ordering.row_windows:
            items = shuffle_stream_windows(items, window.buffer, window.start(self.seed, number))
        return items

    def _units(self, items: Iterator[Item], span: int) -> Iterator[Item]:
        if not self.ordering.unit_windows:
            return items
        tail: list[Item] = []
        units = _whole_units(items, self.ordering.unit, tail)
        for window in self.ordering.unit_windows:
            units = shuffle_stream_windows(units, window.buffer, window.start(self.seed, span))
        return itertools.chain(itertools.chain.from_iterable(units), tail)

    def _own_seed(self) -> int:
        if self.own is None:
            return self.seed
        worker = get_worker_info()
        return mixed_seed(self.seed, self.own.index, worker.id if worker is not None else 0)


def _whole_units(items: Iterator[Item], size: int, tail: list[Item]) -> Iterator[list[Item]]:
    """Yield runs of `size` items; those that are left go to `tail`."""
    while unit := list(itertools.islice(items, size)):
        if len(unit) < size:
            tail += unit
            return
        yield unit
