"""A server whose rows have left its memory for files, against one that holds the same rows in memory.

Each is a process of its own, that of the spilled table in a memory control group of `--memory` bytes where such groups
may be made; workers train with both in turn, over the wire. Rows have `--dim` values with Adagrad, ids are Zipf.

step       ids/s of training steps: a pull and a push of the distinct ids of 8,190 draws
train      ids/s of the same steps with a network on 315 examples of 26 rows between pull and push
pull       ids/s of the same pulls alone
cold       ids/s of pulls of ids drawn evenly, of which memory holds few
rocksdict  step beside the same rows in RocksDB with a cache of as much memory, in the process of its workers: no wire

    python -m benchmarks.bench_tiers --rows 4000000 --dim 256 --budget 256 --exponent 1.35 --cases step     8 GB of rows

Prints for each case the share of pulled ids whose rows were in memory, the server's processor time for each id that was
not, beyond what an id in memory takes, and at the end the bytes of memory and files.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.peers import PeerMissingError
from benchmarks.report import Row, add_arguments, check_cases, measure_pairs, show
from benchmarks.tiers_model import SLOTS, TierModel
from benchmarks.tiers_rocks import RocksServer, RocksWorker
from benchmarks.tiers_server import TierServer, TierWorker
from phalanx.ps.table.rules import FileDtype, TableSpec
from phalanx.ps.table.update_rules import Adagrad

CASES = ("step", "train", "pull", "cold", "rocksdict")
TABLE = "tiers"
DRAWS, BATCHES, FILLED = 315 * SLOTS, 100, 2_048
MIB = 1 << 20
Ids = NDArray[np.int64]
Batches = Sequence[tuple[Ids, Ids]]
"""Distinct ids, and which of them each draw is."""
Server, Worker = TierServer | RocksServer, TierWorker | RocksWorker


class Bench:
    """Two servers with the same rows, and batches of ids."""

    def __init__(self, asked: argparse.Namespace, folder: Path, stack: ExitStack) -> None:
        self.random = np.random.default_rng(0)
        self.rows = asked.rows
        weights = np.arange(1, self.rows + 1) ** -asked.exponent
        self.shares = np.cumsum(weights / weights.sum())
        self.id_of_rank = self.random.permutation(self.rows)
        self.gradients = self.random.normal(size=(DRAWS, asked.dim)).astype(np.float32)
        self.pool = stack.enter_context(ThreadPoolExecutor(asked.workers))
        self.small, self.large = (
            stack.enter_context(closing(TierServer(folder, name, limit, asked.workers)))
            for name, limit in (("spilled", asked.memory * MIB), ("resident", None))
        )
        self.models = {worker: TierModel(asked.dim) for worker in (*self.small.workers, *self.large.workers)}
        self.spec = spec = TableSpec(TABLE, asked.dim, Adagrad(0.05))
        self.fill(self.small, replace(spec, max_bytes=asked.budget * MIB, file_dtype=asked.file_dtype))
        self.fill(self.large, spec)
        for _ in range(asked.warm):  # so that memory holds what is drawn often
            self.step(self.small, self.zipf())

    def fill(self, server: Server, spec: TableSpec) -> None:
        """Give a server a row for every id."""
        for worker in server.workers:
            worker.declare(spec)
        starts = range(0, self.rows, FILLED)
        every = [np.arange(start, min(start + FILLED, self.rows)) for start in starts]
        self._timed(server, [(ids, ids) for ids in every], self._push)

    def zipf(self) -> Batches:
        """Return batches of distinct ids of Zipf draws."""
        drawn = (np.searchsorted(self.shares, self.random.random(DRAWS)) for _ in range(BATCHES))
        return [_distinct(self.id_of_rank[np.minimum(ranks, self.rows - 1)]) for ranks in drawn]

    def even(self) -> Batches:
        """Return batches of distinct ids, each as likely as any."""
        return [_distinct(self.random.integers(0, self.rows, DRAWS)) for _ in range(BATCHES)]

    def pull(self, server: Server, batches: Batches) -> float:
        """Return ids/s of pulls."""
        return self._timed(server, batches, self._pull)

    def step(self, server: Server, batches: Batches) -> float:
        """Return ids/s of pulls, each with a push behind it."""
        return self._timed(server, batches, self._step)

    def train(self, server: TierServer, batches: Batches) -> float:
        """Return ids/s of steps that train a network."""
        return self._timed(server, batches, self._train)

    def _timed(self, server: Server, batches: Batches, work: Callable[[Any, Batches], None]) -> float:
        """Deal batches to the workers of a server, which are threads here, and return ids/s of all."""
        count = len(server.workers)
        started = time.perf_counter()
        done = [self.pool.submit(work, worker, batches[n::count]) for n, worker in enumerate(server.workers)]
        for each in done:
            each.result()
        return sum(len(keys) for keys, _ in batches) / (time.perf_counter() - started)

    def _pull(self, worker: Worker, batches: Batches) -> None:
        for keys, _ in batches:
            worker.pull(TABLE, keys)

    def _push(self, worker: Worker, batches: Batches) -> None:
        for keys, _ in batches:
            worker.push(TABLE, keys, self.gradients[: len(keys)])
        worker.flush()

    def _step(self, worker: Worker, batches: Batches) -> None:
        for keys, _ in batches:
            worker.pull(TABLE, keys)
            worker.push(TABLE, keys, self.gradients[: len(keys)])
        worker.flush()

    def _train(self, worker: TierWorker, batches: Batches) -> None:
        model = self.models[worker]
        for keys, places in batches:
            worker.push(TABLE, keys, model.train_step(worker.pull(TABLE, keys), places))
        worker.flush()


def _distinct(ids: Ids) -> tuple[Ids, Ids]:
    keys, places = np.unique(ids, return_inverse=True)
    return keys, places


def measure(bench: Bench, case: str, pairs: int) -> Row:
    """Measure one case on both servers in turn."""
    call = {"step": bench.step, "train": bench.train}.get(case, bench.pull)
    batches = bench.even if case == "cold" else bench.zipf
    small, large = bench.small, bench.large
    before = small.counts(TABLE), large.counts(TABLE)
    cpu = small.cpu_seconds, large.cpu_seconds
    row = measure_pairs(
        case, lambda: call(small, batches()), lambda: call(large, batches()), pairs=pairs, unit="ids/s",
        better="higher", peer_name="the same table in memory",
    )  # fmt: skip
    spent = small.cpu_seconds - cpu[0], large.cpu_seconds - cpu[1]
    after = small.counts(TABLE), large.counts(TABLE)
    pulled = [now["pulled"] - then["pulled"] for then, now in zip(before, after, strict=True)]
    read = after[0]["file_reads"] - before[0]["file_reads"]
    more = spent[0] - spent[1] * pulled[0] / pulled[1]
    print(
        f"{case}: {1 - read / pulled[0]:.1%} of {pulled[0]:,} pulled ids in memory; {read:,} rows read from files, "
        f"{more / max(read, 1) * 1e6:.1f} us of processor time each beyond {spent[1] / pulled[1] * 1e6:.2f} us an id",
        file=sys.stderr,
    )
    return row


def measure_rocks(bench: Bench, asked: argparse.Namespace, folder: Path, pairs: int) -> Row:
    """Measure steps of the spilled table, and of the same rows in RocksDB."""
    with closing(RocksServer(folder, asked.budget * MIB, asked.workers)) as rocks:
        bench.fill(rocks, bench.spec)
        rocks.settle()
        for _ in range(asked.warm):
            bench.step(rocks, bench.zipf())
        return measure_pairs(
            "rocksdict", lambda: bench.step(bench.small, bench.zipf()), lambda: bench.step(rocks, bench.zipf()),
            pairs=pairs, unit="ids/s", better="higher", peer_name="RocksDB (rocksdict 0.3.29)",
        )  # fmt: skip


def describe(bench: Bench) -> None:
    """Print what the servers hold, and in how much memory."""
    counts = bench.small.counts(TABLE)
    resident, most = bench.small.memory_bytes
    limit = f"its control group counted {most // MIB} MiB at most" if bench.small.is_limited else "no control group"
    print(
        f"{counts['rows']:,} rows, {counts['stored']:,} of them in files of {counts['file_bytes'] // MIB} MiB; the "
        f"table takes {counts['bytes'] // MIB} MiB of memory, its server {resident // MIB} MiB, {limit}; in memory the "
        f"same table takes {bench.large.counts(TABLE)['bytes'] // MIB} MiB",
        file=sys.stderr,
    )


def main() -> None:
    """Run the cases asked for."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser, CASES)
    parser.add_argument("--rows", type=int, help="rows of the table")
    parser.add_argument("--dim", type=int, default=64, help="values of a row; it takes twice as many numbers")
    parser.add_argument("--memory", type=int, default=512, help="MiB that the group of the spilled server may use")
    parser.add_argument(
        "--budget", type=int, help="max_bytes of its table in MiB; for a tenth of the rows when omitted"
    )
    parser.add_argument("--file-dtype", choices=get_args(FileDtype), default="float32", help="of values in files")
    parser.add_argument("--workers", type=int, default=2, help="threads that train with a server")
    parser.add_argument("--exponent", type=float, default=1.2, help="of the Zipf distribution of ids")
    parser.add_argument("--warm", type=int, default=5, help="times 100 steps before the first that counts")
    parser.add_argument("--folder", type=Path, help="on the disk for rows; one for temporary files when omitted")
    asked = parser.parse_args()
    check_cases(parser, asked, CASES)
    torch.set_num_threads(1)  # each worker has a core
    asked.rows = asked.rows or (50_000 if asked.quick else 1_000_000)
    asked.budget = asked.budget or (asked.rows // 10 * asked.dim * 8 + asked.rows * 32) // MIB + 1
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder, ExitStack() as stack:
        bench, pairs = Bench(asked, Path(folder), stack), 1 if asked.quick else 7
        rows = [measure(bench, case, pairs) for case in asked.cases if case != "rocksdict"]
        if "rocksdict" in asked.cases:
            try:
                rows.append(measure_rocks(bench, asked, Path(folder), pairs))
            except PeerMissingError as error:
                print(f"skipped rocksdict: {error}", file=sys.stderr)
        describe(bench)
    show("bench_tiers", rows, as_json=asked.json)


if __name__ == "__main__":
    main()
