"""A table of ten times the rows that its memory holds, against the same table without a limit.

Rows of 64 values with Adagrad, Zipf ids, one thread.

step      ids/s of training steps: a pull and a push of the distinct ids of 8,192 draws
pull      ids/s of the same pulls alone
cold      ids/s of pulls of ids drawn evenly, of which memory holds few

Prints the share of the ids of pulls and pushes whose rows were in memory, and the bytes of memory and files.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import Row, arguments, measure_pairs, show
from phalanx.ps.table.rules import TableSpec
from phalanx.ps.table.table import RowTable, make_table
from phalanx.ps.table.update_rules import Adagrad

CASES = ("step", "pull", "cold")
DIM, DRAWS, BATCHES = 64, 8_192, 20
ROW_BYTES, INDEX_BYTES = 512, 32
EXPONENT = 1.05
"""Of the Zipf distribution of ids; the most frequent tenth of a million ids is drawn four times in five."""


class Bench:
    """A table with a limit, its twin without one, and batches of ids."""

    def __init__(self, rows: int) -> None:
        self.random = np.random.default_rng(0)
        self.rows = rows
        weights = np.arange(1, rows + 1) ** -EXPONENT
        self.shares = np.cumsum(weights / weights.sum())
        self.gradients = self.random.normal(size=(DRAWS, DIM)).astype(np.float32)
        self.out = np.empty((DRAWS, DIM), np.float32)
        memory = rows // 10 * ROW_BYTES + rows * INDEX_BYTES
        self.small = self.filled(TableSpec("tiers", DIM, Adagrad(0.05), max_bytes=memory))
        self.large = self.filled(TableSpec("tiers", DIM, Adagrad(0.05)))
        for _ in range(5):  # so that memory holds what is drawn often
            self.step(self.small, self.zipf())

    def filled(self, spec: TableSpec) -> RowTable:
        """Return a table with a row for every id."""
        table = make_table(spec)
        for first in range(0, self.rows, DRAWS):
            keys = np.arange(first, min(first + DRAWS, self.rows))
            table.push(keys, self.gradients[: len(keys)])
        return table

    def zipf(self) -> list[NDArray[np.int64]]:
        """Return batches of distinct ids of Zipf draws."""
        return [np.unique(np.searchsorted(self.shares, self.random.random(DRAWS))) for _ in range(BATCHES)]

    def even(self) -> list[NDArray[np.int64]]:
        """Return batches of distinct ids, each as likely as any."""
        return [np.unique(self.random.integers(0, self.rows, DRAWS)) for _ in range(BATCHES)]

    def pull(self, table: RowTable, batches: Sequence[NDArray[np.int64]]) -> float:
        """Return ids/s of pulls."""
        started = time.perf_counter()
        for keys in batches:
            table.pull(keys, self.out[: len(keys)])
        return sum(map(len, batches)) / (time.perf_counter() - started)

    def step(self, table: RowTable, batches: Sequence[NDArray[np.int64]]) -> float:
        """Return ids/s of pulls, each with a push behind it."""
        started = time.perf_counter()
        for keys in batches:
            table.pull(keys, self.out[: len(keys)])
            table.push(keys, self.gradients[: len(keys)])
        return sum(map(len, batches)) / (time.perf_counter() - started)


def measure(bench: Bench, case: str, pairs: int) -> Row:
    """Measure one case on both tables in turn."""
    call = bench.step if case == "step" else bench.pull
    batches = bench.even if case == "cold" else bench.zipf
    pulled, pushed, read = bench.small.pulled, bench.small.pushed, bench.small.file_reads
    row = measure_pairs(
        case, lambda: call(bench.small, batches()), lambda: call(bench.large, batches()), pairs=pairs, unit="ids/s",
        better="higher", peer_name="the same table in memory",
    )  # fmt: skip
    named = bench.small.pulled - pulled + bench.small.pushed - pushed
    hits = 1 - (bench.small.file_reads - read) / named
    print(
        f"{case}: {hits:.1%} of ids in memory; {bench.small.rows:,} rows, {bench.small.stored:,} of them "
        f"in files of {bench.small.file_bytes >> 20} MiB; memory {bench.small.bytes >> 20} MiB, without a limit "
        f"{bench.large.bytes >> 20} MiB",
        file=sys.stderr,
    )
    return row


def main() -> None:
    """Run the cases asked for."""
    asked = arguments(CASES)
    bench = Bench(50_000 if asked.quick else 2_000_000)
    show("bench_tiers", [measure(bench, case, 1 if asked.quick else 7) for case in asked.cases], as_json=asked.json)


if __name__ == "__main__":
    main()
