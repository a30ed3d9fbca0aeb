"""`EpochPlan`: split an epoch into global batches, and these over ranks (pure).

An epoch is the positions 0 to n - 1. It is split into global batches first, and each global batch over the ranks
second, so the global batches, and with them the training, are the same for any world size.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from phalanx.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RankBatch:
    """One rank's part of one global batch, as positions of the epoch."""

    start: int
    """First position this rank loads."""

    count: int
    """How many positions it loads; at least 1, so that its model always has something to compute on."""

    rows: int
    """How many of them count: `count`, or 0 if the sample only keeps the ranks in step."""

    global_rows: int
    """Samples of the global batch."""


def even_split(size: int, parts: int, index: int) -> tuple[int, int]:
    """Split `size` items into `parts` runs whose lengths differ by at most 1, the longer ones first.

    Returns:
        (offset, length) of run `index`.
    """
    length, longer = divmod(size, parts)
    return index * length + min(index, longer), length + (index < longer)


def read_count(name: str, value: Any) -> int:
    """Return a count that a user passed, as an int.

    Raises:
        ConfigError: If it is no integer of 1 or more; names the argument.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ConfigError(
            f"Asked for {name}={value!r}, found a value of type {type(value).__name__}. "
            "Give a whole number, such as 64."
        )
    rows = operator.index(value)
    if rows < 1:
        raise ConfigError(f"Asked for {name}={rows}. Give at least 1.")
    return rows


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """One epoch, or the rest of it, split into global batches."""

    rows: int
    """Samples of the whole epoch."""

    global_batch: int
    """Samples of one global batch, over all ranks."""

    drop_last: bool = False
    """Whether a last batch that is not full is left out."""

    first: int = 0
    """Position of the first batch; not 0 for a resumed epoch."""

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise ConfigError(f"Asked for a global batch of {self.global_batch} samples. Give at least 1.")
        if not 0 <= self.first <= self.rows:
            raise ConfigError(
                f"Asked to resume at position {self.first}, but the epoch has {self.rows} samples. "
                "Resume with the dataset the position was saved with."
            )

    @property
    def steps(self) -> int:
        """Number of global batches; the same on every rank."""
        left = self.rows - self.first
        return left // self.global_batch if self.drop_last else -(-left // self.global_batch)

    def position_after(self, step: int) -> int:
        """Return the position that follows the last sample of global batch `step`."""
        return min(self.first + (step + 1) * self.global_batch, self.rows)

    def rank_batch(
        self, step: int, rank: int, world_size: int, cut: Callable[[int], tuple[int, int]] | None = None
    ) -> RankBatch:
        """Return what `rank` loads of global batch `step`.

        The ranks' parts are consecutive runs in rank order; concatenated they are the global batch. A rank for which no
        sample is left loads the batch's first sample, which then does not count.

        Args:
            step: 0 to `steps` - 1.
            rank: 0 to `world_size` - 1.
            world_size: Number of ranks.
            cut: Gives (offset, length) of the rank's part of so many samples; an even part when None.
        """
        batch_start = self.first + step * self.global_batch
        global_rows = self.position_after(step) - batch_start
        offset, count = even_split(global_rows, world_size, rank) if cut is None else cut(global_rows)
        if count == 0:
            return RankBatch(start=batch_start, count=1, rows=0, global_rows=global_rows)
        return RankBatch(start=batch_start + offset, count=count, rows=count, global_rows=global_rows)
