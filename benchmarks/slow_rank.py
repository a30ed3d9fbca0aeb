"""One rank of bench_slow: steps of about 2 ms with a loader, a small network and collectives, and their median time."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

BATCH, WIDTH, FIRST = 32, 256, 50


def main(case: str, steps: int) -> None:
    """Train, and print the median of a step on rank 0.

    Args:
        case: A backend of torch DDP, or `elastic` for a job whose ranks may leave and join.
        steps: Steps that are measured.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model: nn.Module = nn.Sequential(*layers)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader: Iterable[Any]
    if case == "elastic":
        import phalanx as px

        data = TensorDataset(torch.randn(2 * BATCH * (steps + FIRST), WIDTH))
        model, optimizer, loader = px.distribute(model, optimizer, data, global_batch=2 * BATCH)
    else:
        if case == "shm":
            import phalanx as px

            px.init()
        else:
            dist.init_process_group(case)
        model = DistributedDataParallel(model)
        loader = DataLoader(TensorDataset(torch.randn(BATCH * (steps + FIRST), WIDTH)), batch_size=BATCH)
    times = []
    before = time.perf_counter()
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        now = time.perf_counter()
        times.append(now - before)
        before = now
    if os.environ["RANK"] == "0":
        print(f"STEP {statistics.median(times[FIRST:])}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
