"""`PipelineOrder`: the sample order of a data pipeline with shuffle, batch and repeat.

A *pass* is the dataset's samples once. A *span* is split into batches without a break: one pass, or several that
`repeat` joined before `batch`. An epoch is one span, or several if `repeat` comes after `batch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.comm.context import BatchShare
from phalanx.data.sampling.order import BatchRequest, plan_epoch, shares_of, steps_and_parts
from phalanx.data.sampling.ranks import DataShard
from phalanx.data.sampling.row_rng import Draws
from phalanx.data.sampling.shards import EpochPlan
from phalanx.data.sampling.shuffle import mixed_seed
from phalanx.data.sampling.windows import shuffle_windows
from phalanx.errors import ConfigError

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Window:
    """One `shuffle` of a chain."""

    buffer: int
    """Elements of a window."""

    number: int
    """Index of the step in the chain, so that two shuffles differ."""

    seed: int = 0
    """The user's seed, combined with that of the run."""

    def start(self, seed: int, time: int) -> int:
        """Return the seed of this shuffle in a run of `seed`, for the pass or span `time`."""
        return mixed_seed(seed, time, self.number, self.seed)

    def __str__(self) -> str:
        return f"shuffle({self.buffer}{f', seed={self.seed}' if self.seed else ''})"


@dataclass(frozen=True, kw_only=True)
class Ordering:
    """How the operations of a pipeline order the samples, for any data."""

    row_windows: tuple[Window, ...] = ()
    unit: int = 1
    """Samples that stay together in `unit_windows`: a batch of the user."""

    unit_windows: tuple[Window, ...] = ()
    joined: int = 1
    """Passes of a span."""

    spans: int = 1
    """Spans of an epoch."""

    @property
    def shuffles(self) -> bool:
        """Whether the user chose an order."""
        return bool(self.row_windows or self.unit_windows)

    def __str__(self) -> str:
        steps = [str(window) for window in self.row_windows]
        steps += [f"repeat({self.joined})"] * (self.joined > 1)
        steps += [f"{window} of batches of {self.unit}" for window in self.unit_windows]
        steps += [f"repeat({self.spans}) of batches"] * (self.spans > 1)
        return ", ".join(steps) or "in order"


@dataclass(frozen=True, kw_only=True)
class PipelineOrder:
    """Samples in the order of a pipeline, split into global batches. See `EpochOrder`.

    Positions count the samples of an epoch's spans, including those that `drop_last` drops.
    """

    rows: int
    """Rows of the dataset."""

    ordering: Ordering
    global_batch: Callable[[int], int]
    """Rows of a global batch for a given number of shards."""

    seed: Callable[[], int]
    drop_last: bool = False

    @property
    def span(self) -> int:
        """Rows of a span."""
        return self.rows * self.ordering.joined

    def steps(self, shard_count: int) -> int:
        """See `EpochOrder`."""
        return self.ordering.spans * self._plan_span(shard_count).steps

    def shares(self, shard: DataShard) -> tuple[BatchShare, ...]:
        """See `EpochOrder`."""
        return shares_of(self._plan_span(shard.count), shard)

    def requests(self, epoch: int, shard: DataShard, first: int = 0) -> Iterator[BatchRequest]:
        """See `EpochOrder`."""
        spans = self.ordering.spans
        if not 0 <= first <= self.span * spans:
            raise ConfigError(
                f"Asked to resume at position {first}, but the epoch of this pipeline has {self.span * spans} samples. "
                "Resume with the pipeline the position was saved with."
            )
        for number in range(first // self.span, spans):
            before = number * self.span
            plan = self._plan_span(shard.count, max(first - before, 0))
            for step, index in steps_and_parts(plan.steps, shard):
                cut = shard.slicing(epoch, before + plan.position_after(step))
                part = plan.rank_batch(step, index, shard.count, cut)
                indices, seeds = self.at(epoch * spans + number, part.start, part.count)
                yield BatchRequest(
                    indices,
                    BatchShare(part.rows, part.global_rows),
                    before + plan.position_after(step),
                    mixed_seed(self.seed(), epoch, before + plan.position_after(step), index),
                    seeds,
                )

    def at(self, span: int, start: int, count: int) -> tuple[Indices, NDArray[np.uint64]]:
        """Return the samples at positions of a span, and the seed of each, shapes (count,).

        Args:
            span: Counted over all epochs.
            start: First position of the span.
            count: How many positions.
        """
        positions = self._indices_of_units(np.arange(start, start + count), span)
        if self.ordering.joined == 1:
            return self._indices_of_pass(positions, span)
        indices, seeds = np.empty_like(positions), np.empty(count, np.uint64)
        passes = positions // self.rows
        for number in np.unique(passes):
            is_in_pass = passes == number
            offsets = positions[is_in_pass] - number * self.rows
            indices[is_in_pass], seeds[is_in_pass] = self._indices_of_pass(
                offsets, span * self.ordering.joined + int(number)
            )
        return indices, seeds

    def _indices_of_units(self, positions: Indices, span: int) -> Indices:
        unit = self.ordering.unit
        units = self.span // unit
        if not self.ordering.unit_windows or units < 2:
            return positions
        which, within = positions // unit, positions % unit
        is_full = which < units
        numbers = which[is_full]
        # Samples of one unit are adjacent: each number is looked up once.
        numbers, back = np.unique(numbers, return_inverse=True)
        for window in reversed(self.ordering.unit_windows):
            numbers = shuffle_windows(units, window.buffer, window.start(self.seed(), span), numbers)
        which[is_full] = numbers[back]
        return which * unit + within

    def _indices_of_pass(self, positions: Indices, number: int) -> tuple[Indices, NDArray[np.uint64]]:
        for window in reversed(self.ordering.row_windows):
            positions = shuffle_windows(self.rows, window.buffer, window.start(self.seed(), number), positions)
        return positions, Draws.of_rows(self.seed(), number, positions).seeds

    def _plan_span(self, shard_count: int, first: int = 0) -> EpochPlan:
        return plan_epoch(self.span, self.global_batch(shard_count), self.drop_last, first)
