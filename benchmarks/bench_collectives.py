"""All-reduce of float32 between ranks of one host: shared memory against gloo, in the same processes."""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.report import Row, arguments, measure_pairs, show
from phalanx.comm import shared_memory
from phalanx.comm.freed_memory import keep_freed_memory

SIZES = {"64 B": 64, "1 MB": 1_000_000, "25 MB": 25_000_000, "100 MB": 100_000_000}
RANKS = (2, 4)
CASES = {f"all_reduce {size} {ranks} ranks gloo": (ranks, count) for ranks in RANKS for size, count in SIZES.items()}


def times_of(size: int, *, quick: bool) -> int:
    """Return how many calls one reading is the median of."""
    return 3 if quick else max(5, min(200, 50_000_000 // size))


def reading(group: Any, size: int, *, quick: bool) -> Callable[[], float]:
    """Return what measures one side: the median time of a call, in us. Collective."""
    x = torch.ones(size // 4)

    def read() -> float:
        times = []
        for _ in range(times_of(size, quick=quick)):
            x.fill_(1.0)  # gradients come warm from the backward pass too
            dist.barrier()
            started = time.perf_counter()
            dist.all_reduce(x, group=group)
            times.append(time.perf_counter() - started)
        return statistics.median(times) * 1e6

    return read


def run_rank(rank: int, ranks: int, store: str, cases: list[str], quick: bool, results: Any) -> None:
    """Measure every case on one rank; rank 0 tells the rows."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as px.init does; the peer has it too
    shared_memory.register()
    dist.init_process_group("shm", init_method=f"file://{store}", rank=rank, world_size=ranks)
    gloo = dist.new_group(backend="gloo")
    rows = []
    for case in cases:
        size = CASES[case][1]
        ours, peer = reading(None, size, quick=quick), reading(gloo, size, quick=quick)
        ours(), peer()  # the first calls connect, and touch memory
        # Every rank takes the sides in the same order.
        rows.append(
            measure_pairs(case, ours, peer, pairs=1 if quick else 9, unit="us", better="lower", peer_name="gloo")
        )
    if rank == 0:
        results.send(rows)
    dist.barrier()
    dist.destroy_process_group()


def measure(ranks: int, cases: list[str], *, quick: bool) -> list[Row]:
    """Start the ranks and return their rows."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=run_rank, args=(rank, ranks, f"{folder}/store", cases, quick, sender))
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
        if cases := [case for case in asked.cases if CASES[case][0] == ranks]:
            rows += measure(ranks, cases, quick=asked.quick)
    show("bench_collectives", rows, as_json=asked.json)


if __name__ == "__main__":
    main()
