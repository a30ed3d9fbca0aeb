"""The order of a data pipeline: a function from positions of an epoch to rows of a dataset.

A *pass* is the dataset's rows once. A *span* is what batches are cut from without a break: one pass, or several that
`repeat` joined before `batch`. An epoch is one span, or several that `repeat` set one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.comm.context import BatchShare
from phalanx.data.sampling.order import Work, cut, shares_of
from phalanx.data.sampling.ranks import Shard
from phalanx.data.sampling.row_rng import Draws
from phalanx.data.sampling.shards import EpochPlan
from phalanx.data.sampling.shuffle import mixed_seed
from phalanx.data.sampling.windows import windowed
from phalanx.errors import ConfigError

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Window:
    """One `shuffle` of a chain."""

    buffer: int
    """Elements of a window."""

    number: int
    """Which step of the chain it is, so that two shuffles are different ones."""

    seed: int = 0
    """The user's own, beside that of the run."""

    def start(self, seed: int, time: int) -> int:
        """Return where its random numbers start in a run of `seed`, for the pass or span `time`."""
        return mixed_seed(seed, time, self.number, self.seed)

    def __str__(self) -> str:
        return f"shuffle({self.buffer}{f', seed={self.seed}' if self.seed else ''})"


@dataclass(frozen=True, kw_only=True)
class Ordering:
    """What the verbs of a pipeline do to the order, whatever the data."""

    row_windows: tuple[Window, ...] = ()
    unit: int = 1
    """Rows that stay together in `unit_windows`: a batch as the user cut it."""

    unit_windows: tuple[Window, ...] = ()
    joined: int = 1
    """Passes of a span."""

    spans: int = 1
    """Spans of an epoch."""

    @property
    def shuffles(self) -> bool:
        """Whether the user said in which order."""
        return bool(self.row_windows or self.unit_windows)

    def __str__(self) -> str:
        said = [str(window) for window in self.row_windows]
        said += [f"repeat({self.joined})"] * (self.joined > 1)
        said += [f"{window} of batches of {self.unit}" for window in self.unit_windows]
        said += [f"repeat({self.spans}) of batches"] * (self.spans > 1)
        return ", ".join(said) or "in order"


@dataclass(frozen=True, kw_only=True)
class PipelineOrder:
    """Rows as a pipeline orders them; cut into global batches here. See `Order`.

    Positions count the rows of an epoch's spans, those that `drop_last` leaves out included.
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
        """See `Order`."""
        return self.ordering.spans * self._cut(shard_count).steps

    def shares(self, shard: Shard) -> tuple[BatchShare, ...]:
        """See `Order`."""
        return shares_of(self._cut(shard.count), shard)

    def works(self, epoch: int, shard: Shard, first: int = 0) -> Iterator[Work]:
        """See `Order`."""
        spans = self.ordering.spans
        if not 0 <= first <= self.span * spans:
            raise ConfigError(
                f"Asked to resume at position {first}, but the epoch of this pipeline has {self.span * spans} rows. "
                "Resume with the pipeline the position was saved with."
            )
        for number in range(first // self.span, spans):
            before = number * self.span
            plan = self._cut(shard.count, max(first - before, 0))
            for step in range(plan.steps):
                part = plan.rank_batch(step, shard.index, shard.count)
                indices, seeds = self.at(epoch * spans + number, part.start, part.count)
                yield Work(
                    indices,
                    BatchShare(part.rows, part.global_rows),
                    before + plan.position_after(step),
                    mixed_seed(self.seed(), epoch, before + plan.position_after(step), shard.index),
                    seeds,
                )

    def at(self, span: int, start: int, count: int) -> tuple[Rows, NDArray[np.uint64]]:
        """Return the rows at positions of a span, and where the random numbers of each start, shapes (count,).

        Args:
            span: Counted over all epochs.
            start: First position of the span.
            count: How many positions.
        """
        positions = self._rows_of_units(np.arange(start, start + count), span)
        if self.ordering.joined == 1:
            return self._rows_of_pass(positions, span)
        rows, seeds = np.empty_like(positions), np.empty(count, np.uint64)
        passes = positions // self.rows
        for one in np.unique(passes):
            here = passes == one
            within = positions[here] - one * self.rows
            rows[here], seeds[here] = self._rows_of_pass(within, span * self.ordering.joined + int(one))
        return rows, seeds

    def _rows_of_units(self, positions: Rows, span: int) -> Rows:
        unit = self.ordering.unit
        units = self.span // unit
        if not self.ordering.unit_windows or units < 2:
            return positions
        which, within = positions // unit, positions % unit
        whole = which < units
        numbers = which[whole]
        # Rows of one unit stand side by side: each number is looked up once.
        numbers, back = np.unique(numbers, return_inverse=True)
        for window in reversed(self.ordering.unit_windows):
            numbers = windowed(units, window.buffer, window.start(self.seed(), span), numbers)
        which[whole] = numbers[back]
        return which * unit + within

    def _rows_of_pass(self, positions: Rows, number: int) -> tuple[Rows, NDArray[np.uint64]]:
        for window in reversed(self.ordering.row_windows):
            positions = windowed(self.rows, window.buffer, window.start(self.seed(), number), positions)
        return positions, Draws.of_rows(self.seed(), number, positions).seeds

    def _cut(self, shard_count: int, first: int = 0) -> EpochPlan:
        return cut(self.span, self.global_batch(shard_count), self.drop_last, first)
