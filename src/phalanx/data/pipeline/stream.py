"""A pipeline over data that can only be read one row after the other: the same order as over data with a length."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import get_worker_info

from phalanx.data.pipeline.columns import transposed, values_of
from phalanx.data.pipeline.order import Ordering
from phalanx.data.pipeline.pipeline import Pipeline
from phalanx.data.sampling.ranks import Shard
from phalanx.data.sampling.row_rng import Draws
from phalanx.data.sampling.shuffle import mixed_seed
from phalanx.data.sampling.windows import windowed_stream

Item = tuple[list[Any], int, int]
"""Values by column, the pass, and the row's number in it."""


class PipelineStream:
    """One epoch of a pipeline over a stream, before it is cut into batches.

    Args:
        pipeline: What to read and map.
        ordering: In which order.
        seed: Of the loader.
        epoch: Which epoch.
        own: Whose rows these are when each rank has its own; None for rows that all ranks share.
    """

    def __init__(self, pipeline: Pipeline, ordering: Ordering, seed: int, epoch: int, own: Shard | None) -> None:
        self.pipeline, self.ordering, self.own = pipeline, ordering, own
        self.seed, self.epoch = seed, epoch

    def spans(self) -> Iterator[Iterator[Item]]:
        """Yield the epoch's spans (see `data/pipeline/order.py`), each to be read before the next."""
        for number in range(self.ordering.spans):
            span = self.epoch * self.ordering.spans + number
            passes = (self._rows(span * self.ordering.joined + one) for one in range(self.ordering.joined))
            yield self._units(itertools.chain.from_iterable(passes), span)

    def collate(self, items: list[Item]) -> Any:
        """Return the batch of these rows."""
        values, passes, rows = zip(*items, strict=True)
        numbers, seeds = np.array(rows), np.empty(len(rows), np.uint64)
        for one in set(passes):
            here = np.array(passes) == one
            seeds[here] = Draws.of_rows(self._own_seed(), one, numbers[here]).seeds
        return self.pipeline.finish(transposed(list(values), self.pipeline.names), seeds)

    def _rows(self, number: int) -> Iterator[Item]:
        dataset, names = self.pipeline.dataset, self.pipeline.names
        described = getattr(dataset, "described", type(dataset).__name__)
        items: Iterator[Item] = (
            (values_of(sample, names, row, described), number, row) for row, sample in enumerate(dataset)
        )
        for window in self.ordering.row_windows:
            items = windowed_stream(items, window.buffer, window.start(self.seed, number))
        return items

    def _units(self, items: Iterator[Item], span: int) -> Iterator[Item]:
        if not self.ordering.unit_windows:
            return items
        tail: list[Item] = []
        units = _whole_units(items, self.ordering.unit, tail)
        for window in self.ordering.unit_windows:
            units = windowed_stream(units, window.buffer, window.start(self.seed, span))
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
