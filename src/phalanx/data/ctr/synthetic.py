"""`SyntheticClicks`: generated click data in the Criteo format, with a known best AUC.

Row i is a function of (seed, i) alone, so any worker makes any range without files. Each of the 26 slots draws its
rank from a Zipf law over a cardinality of the real logs (the MLPerf preprocessing) times `scale`; an id is a hash of
(seed, slot, rank). A hidden teacher gives every id a vector of 4 values from its hash; the click probability is a
factorisation machine over them (S. Rendle, "Factorization Machines", 2010) plus a linear part of the 13 log-normal
dense values. `bayes_auc` is what no model exceeds.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from phalanx.data.ctr.slot_dataset import ClickDataset
from phalanx.data.ctr.slot_rows import Batch, SlotRows
from phalanx.data.sampling.ranks import current_shard
from phalanx.data.sampling.shards import even_split
from phalanx.data.sampling.shuffle import hash_numbers, mixed_seed
from phalanx.errors import ConfigError

CARDINALITIES = (
    45_833_188, 36_746, 17_245, 7_413, 20_243, 3, 7_114, 1_441, 62, 29_275_261, 1_572_176, 345_138, 10, 2_209, 11_267,
    128, 4, 974, 14, 48_937_457, 11_316_796, 40_094_537, 452_104, 12_606, 104, 35,
)  # fmt: skip
"""Ids of each slot at scale 1."""

DENSE = 13
TOP_SHARE = 0.92
"""Share of a big slot's accesses that the most frequent 1% of its ids take."""

DRIFT = 0.05
"""Share of ids that get a new name each day."""

_BIAS, _DENSE_WEIGHT, _LINEAR, _PAIRS = -1.3, 0.15, 0.35, 0.12
_RANK, _NORMAL, _ID, _TEACHER, _LABEL, _RENAME = range(6)
_BLOCK = 8192


class SyntheticClicks(ClickDataset):
    """Rows of synthetic clicks; iterating, or a loader, gives each worker its own range.

    Args:
        rows: How many there are, over all workers.
        scale: Factor of the slots' cardinalities; 1e-3 has 178,000 ids, 1 has 178 million.
        seed: Another seed, another world: other ids, another teacher.
        rows_per_day: Rows until the next day renames 5% of the ids; no drift when None.
        batch_size: Rows of this worker's batches; may be left to the loader.
    """

    def __init__(
        self,
        rows: int,
        *,
        scale: float = 1e-3,
        seed: int = 0,
        rows_per_day: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        if rows < 1 or not 0 < scale <= 1 or (rows_per_day is not None and rows_per_day < 1):
            raise ConfigError(
                f"Asked for {rows} rows at scale {scale} with rows_per_day={rows_per_day}. Give at least 1 row, a "
                "scale of up to 1, and days of at least 1 row."
            )
        self.rows, self.seed, self.rows_per_day, self.batch_size = rows, seed, rows_per_day, batch_size
        self.cardinalities = np.array([max(3, round(n * scale)) for n in CARDINALITIES])
        self._power = _zipf_power(int(self.cardinalities.max()))

    def _begin_epoch(self, rows: int, drop_last: bool) -> Iterator[Batch]:
        first, count = even_split(self.rows, current_shard()[1], current_shard()[0])
        step = max(_BLOCK // rows, 1) * rows
        for start in range(first, first + count, step):
            block = self.make(start, min(step, first + count - start))
            for at in range(0, len(block), rows):
                batch = block.slice(at, at + rows)
                if len(batch) == rows or not drop_last:
                    yield batch.tensors()

    def make(self, start: int, count: int) -> SlotRows:
        """Return rows `start` to `start + count - 1`: dense (n, 13), ids (n, 26), label 0 or 1."""
        row, ids, normal = self._draw(start, count)
        clicked = _unit(self._hash(_LABEL, row)) < _probability(self._teacher(ids), normal)
        return SlotRows(clicked.astype(np.float32), np.exp(normal), ids.view(np.int64))

    def bayes_auc(self, rows: int = 200_000) -> float:
        """Return the AUC of the true probabilities over the first `rows` rows, expected over their labels."""
        parts = [self._draw(start, min(_BLOCK, rows - start)) for start in range(0, rows, _BLOCK)]
        p = np.sort(np.concatenate([_probability(self._teacher(ids), normal) for _, ids, normal in parts]))
        below = np.cumsum(1 - p) - (1 - p)
        # A pair of equal probabilities counts one half, as does a row with itself.
        pairs = float((p * (below + (1 - p) / 2)).sum())
        return pairs / float(p.sum() * (1 - p).sum())

    def _draw(self, start: int, count: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.float32]]:
        row = np.arange(start, start + count, dtype=np.uint64)
        return row, self._ids(row), self._normal(row)

    def _ids(self, row: NDArray[np.uint64]) -> NDArray[np.uint64]:
        slots = np.arange(len(CARDINALITIES), dtype=np.uint64)
        uniform = _unit(self._hash(_RANK, row[:, None] * np.uint64(64) + slots))
        n = self.cardinalities.astype(np.float64)
        # The inverse of the law's continuous distribution function.
        rank = ((n + 1) ** self._power * uniform + (1 - uniform)) ** (1 / self._power)
        keys = np.minimum(rank.astype(np.int64), self.cardinalities).astype(np.uint64) * np.uint64(64) + slots
        ids = self._hash(_ID, keys)
        if self.rows_per_day is None:
            return ids
        day = row[:, None] // np.uint64(self.rows_per_day)
        for today in range(1, int(day.max(initial=0)) + 1):
            is_renamed = (_unit(hash_numbers(keys, mixed_seed(self.seed, _RENAME, today))) < DRIFT) & (day >= today)
            ids = np.where(is_renamed, hash_numbers(keys, mixed_seed(self.seed, _ID, today)), ids)
        return ids

    def _normal(self, row: NDArray[np.uint64]) -> NDArray[np.float32]:
        columns = np.arange(2 * DENSE, dtype=np.uint64)
        uniform = _unit(self._hash(_NORMAL, row[:, None] * np.uint64(64) + columns))
        # Box and Muller's method; 1 - u is never 0.
        radius, angle = np.sqrt(-2 * np.log(1 - uniform[:, :DENSE])), 2 * np.pi * uniform[:, DENSE:]
        normal: NDArray[np.float32] = (radius * np.cos(angle)).astype(np.float32)
        return normal

    def _teacher(self, ids: NDArray[np.uint64]) -> NDArray[np.float32]:
        """Return the vectors of ids (n, slots), shape (n, slots, 4), values in [-1, 1)."""
        word = hash_numbers(ids, mixed_seed(self.seed, _TEACHER))
        return word.view(np.uint16).reshape(*ids.shape, 4).astype(np.float32) / np.float32(2**15) - np.float32(1)

    def _hash(self, what: int, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        return hash_numbers(numbers, mixed_seed(self.seed, what))


def _probability(vectors: NDArray[np.float32], normal: NDArray[np.float32]) -> NDArray[np.float64]:
    total = vectors.sum(1)
    pairs = (np.square(total) - np.square(vectors).sum(1)).sum(1) / 2
    logit = _BIAS + _LINEAR * total[:, 0] + _PAIRS * pairs + _DENSE_WEIGHT * normal.sum(1)
    chance: NDArray[np.float64] = 1 / (1 + np.exp(-logit.astype(np.float64)))
    return chance


def _unit(hashes: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return numbers in [0, 1), from the hashes' top 53 bits."""
    return (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _zipf_power(n: int) -> float:
    """Return 1 - the exponent with which the first 1% of n ranks take `TOP_SHARE` of the accesses, by bisection."""
    low, high = -2.0, -1e-6
    for _ in range(60):
        middle = (low + high) / 2
        share = ((1 + n / 100) ** middle - 1) / ((1 + n) ** middle - 1)
        low, high = (low, middle) if share < TOP_SHARE else (middle, high)
    return low
