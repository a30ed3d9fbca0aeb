"""One rank of `bench_unequal`: trains a small convolutional net while rank 1's part of a core changes.

Rank 1 enters a control group and sets its quota before each phase. In each phase both ranks train for some seconds
alone, one after the other, then together, and alone again. Rank 0 prints samples/s.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

GLOBAL, REPLICAS, SAMPLES, PERIOD_US = 512, 16, 5120, 100_000
"""Samples of a global batch, logical replicas, samples of an epoch, and the period of the quota, which is Linux's."""

OURS: dict[str, dict[str, Any]] = {
    "even": {},
    "samples": {"balance": "samples"},
    "replicas": {"balance": "replicas", "replicas": REPLICAS},
}
"""Our engines, and the words of `px.distribute`."""

Step = Callable[[Tensor, Tensor], bool]
"""Trains a batch; returns whether that was an update."""


def net() -> nn.Module:
    """Return a net of which arithmetic takes the time, and not what ranks send."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(32 * 16, 10),
    )  # fmt: skip


def images() -> Dataset[Any]:
    """Return images of 32 x 32, and classes."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(SAMPLES, 3, 32, 32, generator=generator), torch.randint(10, (SAMPLES,), generator=generator)
    )


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def with_phalanx(engine: str) -> tuple[Any, Step]:
    """Return loader and step of one of our engines."""
    import phalanx as px

    model = net()
    model, optimizer, loader = px.distribute(model, sgd(model), images(), global_batch=GLOBAL, seed=0, **OURS[engine])
    assert optimizer is not None

    def step(x: Tensor, y: Tensor) -> bool:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        return px.has_updated(optimizer)

    return loader, step


def with_ddp() -> tuple[Any, Step]:
    """Return loader and step of torch DDP, as its tutorial has them."""
    dist.init_process_group("gloo")
    model = net()
    parallel, optimizer, data = nn.parallel.DistributedDataParallel(model), sgd(model), images()
    sampler: Any = DistributedSampler(data)  # type: ignore[arg-type]
    loader = DataLoader(data, GLOBAL // dist.get_world_size(), sampler=sampler)

    def step(x: Tensor, y: Tensor) -> bool:
        optimizer.zero_grad()
        F.cross_entropy(parallel(x), y).backward()
        optimizer.step()
        return True

    return loader, step


def with_accelerate() -> tuple[Any, Step]:
    """Return loader and step of Hugging Face Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = net()
    loader = DataLoader(images(), GLOBAL // accelerator.num_processes, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), loader)

    def step(x: Tensor, y: Tensor) -> bool:
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        return True

    return loader, step


def endless(loader: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches, epoch after epoch."""
    while True:
        yield from loader


def hold(group: Path, cores: float) -> None:
    """Put this process into a control group with so much of a core."""
    (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
    (group / "cpu.cfs_quota_us").write_text(str(int(cores * PERIOD_US) if cores < 1 else -1))
    (group / "cgroup.procs").write_text(str(os.getpid()))


def alone(seconds: float, rows: int) -> float:
    """Train a net of this rank's own, without any other, in passes of so many rows; return samples/s."""
    model, (x, y) = net(), images()[:GLOBAL]  # type: ignore[misc]
    optimizer, done = sgd(model), 0

    def update() -> None:
        optimizer.zero_grad()
        for part, target in zip(x.split(rows), y.split(rows), strict=True):
            F.cross_entropy(model(part), target).backward()
        optimizer.step()

    update()
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        update()
        done += GLOBAL
    return done / (time.perf_counter() - began)


def speeds(seconds: float, rows: int) -> dict[str, float]:
    """Return the sum of the samples/s of both ranks, of each while the other one waits, and of both at once."""
    found = torch.zeros(2)
    for rank in range(2):
        dist.barrier()
        if dist.get_rank() == rank:
            found[0] = alone(seconds, rows)
    dist.barrier()
    found[1] = alone(seconds, rows)
    dist.all_reduce(found)
    return {"alone": float(found[0]), "at once": float(found[1])}


def measure(loader: Any, step: Step, phases: list[float], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Train through the phases; return the speeds of the ranks alone in each, and samples/s of both together."""
    batches, rank = endless(loader), dist.get_rank()
    rows = GLOBAL // REPLICAS if args.engine == "replicas" else GLOBAL

    def train(updates: int) -> float:
        began, done = time.perf_counter(), 0
        while done < updates:
            done += step(*next(batches))
        return time.perf_counter() - began

    train(5)
    found = []
    for cores in phases:
        hold(args.groups[rank], cores if rank == 1 else 1.0)
        before = speeds(args.alone_s, rows)
        settling_s, settled_s = train(args.settle), train(args.updates)
        after = speeds(args.alone_s, rows)
        found.append(
            {
                "cores": cores,
                **{name: (before[name] + after[name]) / 2 for name in before},
                "settled": GLOBAL * args.updates / settled_s,
                "whole": GLOBAL * (args.settle + args.updates) / (settling_s + settled_s),
            }
        )
    return found


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=(*OURS, "ddp", "accelerate"), required=True)
    parser.add_argument("--phases", required=True, help="cores of the slow rank, one number a phase")
    parser.add_argument("--settle", type=int, required=True, help="updates of a phase before the measurement")
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--alone_s", type=float, required=True, help="seconds of each rank alone, before and after")
    parser.add_argument("--groups", type=Path, nargs=2, required=True, help="control groups of the two ranks")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    others = {"ddp": with_ddp, "accelerate": with_accelerate}
    loader, step = others[args.engine]() if args.engine in others else with_phalanx(args.engine)
    found = measure(loader, step, [float(cores) for cores in args.phases.split(",")], args)
    if int(os.environ.get("RANK", "0")) == 0:
        print("FIGURE " + json.dumps(found), flush=True)
    # gloo's threads can hang or abort the interpreter's own shutdown; our launcher's ranks end this way too.
    sys.stdout.flush()
    if args.engine in others:
        os._exit(0)


if __name__ == "__main__":
    main()
