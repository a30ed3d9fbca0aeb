"""One rank of bench_slow: steps of about 2 ms with a loader, a small network and collectives, and their median time."""

from __future__ import annotations

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

BATCH, WIDTH, FIRST = 32, 256, 50


def main(backend: str, steps: int) -> None:
    """Train, and print the median and the mean of a step on rank 0."""
    torch.set_num_threads(1)
    if backend == "shm":
        import phalanx as px

        px.init()
    else:
        dist.init_process_group(backend)
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
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
