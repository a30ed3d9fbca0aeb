"""All-to-all of tokens between ranks of one host: ours over shared memory against plain torch over gloo, in one run.

A router sends tokens of float32 (rows, 512) to the ranks of their experts: evenly, or three of four to the first rank.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.report import Row, arguments, measure_pairs, show
from phalanx import comm
from phalanx.comm import shared_memory
from phalanx.comm.freed_memory import keep_freed_memory

WIDTH = 512
ROWS = (512, 4096, 16384)
RANKS = (2, 4)


@dataclass(frozen=True, slots=True)
class Case:
    """One exchange."""

    ranks: int
    rows: int
    """Tokens of each rank."""

    is_skewed: bool

    @property
    def name(self) -> str:
        """What a row of the results is called."""
        return f"{self.rows} tokens {'skewed' if self.is_skewed else 'even'} {self.ranks} ranks gloo"

    def input_splits(self) -> list[int]:
        """Return how many tokens each rank sends to each."""
        first = self.rows * 3 // 4 if self.is_skewed else self.rows // self.ranks
        rest = (self.rows - first) // (self.ranks - 1)
        return [self.rows - rest * (self.ranks - 1), *[rest] * (self.ranks - 1)]


CASES = {
    case.name: case
    for case in (Case(ranks, rows, is_skewed) for ranks in RANKS for rows in ROWS for is_skewed in (False, True))
}


def reading(exchange: Callable[[], Tensor], *, quick: bool) -> Callable[[], float]:
    """Return what measures one side: the median time of an exchange there and back, in us. Collective."""

    def read() -> float:
        times = []
        for _ in range(3 if quick else 15):
            dist.barrier()
            started = time.perf_counter()
            exchange()
            times.append(time.perf_counter() - started)
        return statistics.median(times) * 1e6

    return read


def sides(case: Case, rank: int, gloo: Any) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Return the exchange by this package, and by plain torch over gloo."""
    tokens, input_splits = torch.randn(case.rows, WIDTH), case.input_splits()
    output_splits = [input_splits[rank]] * case.ranks

    def ours() -> Tensor:
        arrived = comm.all_to_all(tokens, sizes=input_splits, arriving=output_splits)
        return comm.all_to_all(arrived, sizes=output_splits, arriving=input_splits)

    def plain() -> Tensor:
        arrived, back = torch.empty(sum(output_splits), WIDTH), torch.empty_like(tokens)
        dist.all_to_all_single(arrived, tokens, output_splits, input_splits, group=gloo)
        dist.all_to_all_single(back, arrived, input_splits, output_splits, group=gloo)
        return back

    if not (torch.equal(ours(), tokens) and torch.equal(plain(), tokens)):  # the first calls connect, too
        raise RuntimeError(f"{case.name}: tokens that travel there and back are others. Look for a broken exchange.")
    return ours, plain


def run_rank(rank: int, ranks: int, store: str, names: list[str], quick: bool, results: Any) -> None:
    """Measure every case on one rank; rank 0 tells the rows."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as px.init does; the peer has it too
    shared_memory.register()
    dist.init_process_group("shm", init_method=f"file://{store}", rank=rank, world_size=ranks)
    gloo = dist.new_group(backend="gloo")
    rows = []
    for name in names:
        ours, peer = (reading(side, quick=quick) for side in sides(CASES[name], rank, gloo))
        # Every rank takes the sides in the same order.
        rows.append(
            measure_pairs(name, ours, peer, pairs=1 if quick else 9, unit="us", better="lower", peer_name="gloo")
        )
    if rank == 0:
        results.send(rows)
    dist.barrier()
    dist.destroy_process_group()


def measure(ranks: int, names: list[str], *, quick: bool) -> list[Row]:
    """Start the ranks and return their rows."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=run_rank, args=(rank, ranks, f"{folder}/store", names, quick, sender))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        sender.close()
        try:
            rows: list[Row] = receiver.recv()
        except EOFError:
            raise RuntimeError(f"a rank of {ranks} failed; its error is above") from None
        finally:
            for process in processes:
                process.join(60)
    return rows


def main() -> None:
    """Run the cases asked for."""
    asked = arguments(list(CASES))
    rows = []
    for ranks in RANKS:
        if names := [name for name in asked.cases if CASES[name].ranks == ranks]:
            rows += measure(ranks, names, quick=asked.quick)
    show("bench_experts", rows, as_json=asked.json)


if __name__ == "__main__":
    main()
