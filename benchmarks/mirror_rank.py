"""One rank of `bench_mirror`: milliseconds of an update of its shard, with and without a mirror of the next rank's."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import phalanx as px


def optimizer_of(elements: int) -> torch.optim.Optimizer:
    """Return AdamW over so many elements, which have gradients and state."""
    param = torch.nn.Parameter(torch.randn(elements))
    param.grad = torch.randn(elements)
    optimizer = torch.optim.AdamW([param], lr=1e-3)
    optimizer.step()
    return optimizer


def send_state(optimizer: torch.optim.Optimizer, received: Tensor, rank: int, ranks: int) -> None:
    """Give both moments to the rank before this one."""
    (state,) = optimizer.state.values()
    sent = torch.cat([state["exp_avg"], state["exp_avg_sq"]])
    leaving = [sent.numel() if target == (rank - 1) % ranks else 0 for target in range(ranks)]
    arriving = [sent.numel() if source == (rank + 1) % ranks else 0 for source in range(ranks)]
    dist.all_to_all_single(received, sent, arriving, leaving)


def milliseconds(call: Callable[[], object], ranks: int) -> float:
    """Return the median over calls of the time that the slowest rank takes."""
    times = []
    for _ in range(15):
        dist.barrier()
        began = time.perf_counter()
        call()
        slowest = torch.tensor([time.perf_counter() - began])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times.append(1e3 * float(slowest))
    return statistics.median(times[3:])


def main() -> None:
    """Print the figures of rank 0."""
    context, elements = px.init(), int(sys.argv[1])
    torch.set_num_threads(1)
    rank, ranks = context.rank, context.world_size
    own, both, received = optimizer_of(elements), optimizer_of(2 * elements), torch.empty(2 * elements)

    def copy() -> None:
        own.step()
        send_state(own, received, rank, ranks)

    found = {
        "alone": milliseconds(own.step, ranks),
        "twice": milliseconds(both.step, ranks),
        "copied": milliseconds(copy, ranks),
    }
    if rank == 0:
        print("FIGURE " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
