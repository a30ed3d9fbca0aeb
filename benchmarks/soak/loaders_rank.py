"""One rank of a job of the soak whose loader workers send batches that a small /dev/shm does not hold."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

import phalanx as px
from benchmarks.elastic_models import digest

WIDTH = 1 << 18
"""A sample is 1 MB."""


class Rows(Dataset[Any]):
    """Samples that say who loaded them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if (worker := get_worker_info()) is not None:
            (self.folder / f"worker.{os.getppid()}.{worker.id}").write_text(str(os.getpid()))
        time.sleep(0.01)
        return torch.full((WIDTH,), float(index)), torch.tensor(float(index))


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--plain", action="store_true", help="with torch's own loader")
    args = parser.parse_args()
    faulthandler.register(signal.SIGUSR1)  # for a job that does not end
    torch.set_num_threads(1)
    torch.manual_seed(0)
    context = px.init()
    net = nn.Sequential(nn.AvgPool1d(1 << 14), nn.Linear(WIDTH >> 14, 1))
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=1e-5)
    rows = Rows(args.folder)
    if args.plain:
        model, optimizer, _ = px.distribute(net, optimizer)
        own = torch.utils.data.Subset(rows, range(context.rank, len(rows), context.world_size))
        loader: Any = DataLoader(own, batch_size=4, num_workers=args.workers)
    else:
        model, optimizer, loader = px.distribute(
            net, optimizer, rows, global_batch=8, num_workers=args.workers, shuffle=False
        )
    with (args.folder / f"log.{os.getpid()}.jsonl").open("ab", buffering=0) as file:
        for _ in range(2):
            for step, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                (model(x).squeeze(-1) - y).square().mean().backward()
                optimizer.step()
                file.write(json.dumps({"update": step}).encode() + b"\n")
        file.write(json.dumps({"hash": digest(net)}).encode() + b"\n")


if __name__ == "__main__":
    main()
