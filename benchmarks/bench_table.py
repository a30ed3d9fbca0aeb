"""The native table at 10 M rows of 16 values with Adagrad, one thread, against plain arrays whose slots are known.

pull      rows/s of pulls of 16,384 random ids, against `torch.index_select` of as many rows of a (10 M, 16) tensor
push      rows/s of pushes of as many gradients, against the same plain gather
update    the same pushes against Adagrad on two plain tensors: gather, compute, scatter
bytes     memory per row, index and optimizer state included (128 of them payload), against 324 measured once for
          PaddlePaddle 2.6.2 with SGD, which keeps no state
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.report import Row, arguments, measure_pairs, show
from phalanx.ps.table.rules import TableSpec
from phalanx.ps.table.table import RowTable, make_table
from phalanx.ps.table.update_rules import Adagrad

CASES = ("bytes", "pull", "push", "update")
DIM, BATCH, BATCHES = 16, 16_384, 40
LR, EPS = 0.05, 1e-10


class Plain:
    """Values and accumulators as two tensors; an id is its row's number."""

    def __init__(self, rows: int) -> None:
        self.values, self.sums = torch.rand(rows, DIM), torch.rand(rows, DIM)
        self.out = torch.empty(BATCH, DIM)

    def pull(self, slots: torch.Tensor) -> None:
        """Gather rows."""
        torch.index_select(self.values, 0, slots, out=self.out)

    def update(self, slots: torch.Tensor, gradients: torch.Tensor) -> None:
        """Gather, apply Adagrad, scatter."""
        sums = self.sums.index_select(0, slots).addcmul_(gradients, gradients)
        self.sums.index_copy_(0, slots, sums)
        self.values.index_add_(0, slots, gradients / sums.sqrt_().add_(EPS), alpha=-LR)


class Bench:
    """A filled table, the same rows as plain tensors, and the same batches for both."""

    def __init__(self, rows: int) -> None:
        self.random = np.random.default_rng(0)
        self.keys = self.random.integers(-(2**63), 2**63 - 1, rows)
        self.gradients = self.random.normal(size=(BATCH, DIM)).astype(np.float32)
        before = resident_bytes()
        self.table = self.filled()
        self.bytes_per_row = (resident_bytes() - before) / self.table.rows
        self.plain = Plain(rows)
        self.out = np.empty((BATCH, DIM), np.float32)

    def filled(self) -> RowTable:
        """Return a table with a row for every key."""
        table = make_table(TableSpec("bench", DIM, Adagrad(LR, eps=EPS)))
        for start in range(0, len(self.keys), BATCH):
            keys = self.keys[start : start + BATCH]
            table.push(keys, self.gradients[: len(keys)])
        return table

    def batches(self) -> list[NDArray[np.int64]]:
        """Return slots of distinct rows, one from each of as many runs of rows, a new choice at each call."""
        run = len(self.keys) // BATCH
        starts = np.arange(BATCH) * run
        return [self.random.permutation(starts + self.random.integers(0, run, BATCH)) for _ in range(BATCHES)]

    def ours(self, call: Callable[[NDArray[np.int64]], object]) -> float:
        """Return rows/s of a call on ids."""
        return rate([self.keys[slots] for slots in self.batches()], call)

    def peer(self, call: Callable[[torch.Tensor], object]) -> float:
        """Return rows/s of a call on slots."""
        return rate([torch.from_numpy(slots) for slots in self.batches()], call)

    def pull(self) -> float:
        """Return rows/s of our pulls."""
        return self.ours(lambda keys: self.table.pull(keys, self.out[: len(keys)]))

    def push(self) -> float:
        """Return rows/s of our pushes."""
        return self.ours(lambda keys: self.table.push(keys, self.gradients[: len(keys)]))

    def gather(self) -> float:
        """Return rows/s of the plain gather."""
        return self.peer(self.plain.pull)

    def update(self) -> float:
        """Return rows/s of Adagrad on plain tensors."""
        gradients = torch.from_numpy(self.gradients)
        return self.peer(lambda slots: self.plain.update(slots, gradients[: len(slots)]))


def rate(batches: Sequence[Any], call: Callable[[Any], object]) -> float:
    """Return rows/s."""
    started = time.perf_counter()
    for batch in batches:
        call(batch)
    return sum(len(batch) for batch in batches) / (time.perf_counter() - started)


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def measure(bench: Bench, case: str, pairs: int) -> Row:
    """Measure one case on both sides in turn."""
    if case == "bytes":
        per_row = bench.bytes_per_row
        return measure_pairs(
            "resident bytes per row", lambda: per_row, lambda: 324.0, pairs=1, unit="B", better="lower",
            peer_name="PaddlePaddle 2.6.2",
        )  # fmt: skip
    ours, peer, name = {
        "pull": (bench.pull, bench.gather, "torch.index_select"),
        "push": (bench.push, bench.gather, "torch.index_select"),
        "update": (bench.push, bench.update, "Adagrad on plain tensors"),
    }[case]
    return measure_pairs(case, ours, peer, pairs=pairs, unit="rows/s", better="higher", peer_name=name)


def main() -> None:
    """Run the cases asked for."""
    asked = arguments(CASES)
    torch.set_num_threads(1)
    bench = Bench(50_000 if asked.quick else 10_000_000)
    show("bench_table", [measure(bench, case, 1 if asked.quick else 11) for case in asked.cases], as_json=asked.json)


if __name__ == "__main__":
    main()
