"""One rank of `bench_data_parallel`: the same training loop under us or under torch DDP; rank 0 prints samples/s."""

import argparse
import json
import os
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

from examples.resnet.model import ResNet

ENGINES = ("phalanx", "ddp")


def lenet() -> nn.Module:
    """Return the network where latency counts: 62 thousand parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def mlp() -> nn.Module:
    """Return the network where bytes count beside little arithmetic: 2.1 million parameters."""
    return nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 256), nn.ReLU(),
        nn.Linear(256, 10),
    )  # fmt: skip


WORK = {
    "lenet": (lenet, (64, 1, 28, 28), 10),
    "mlp": (mlp, (64, 784), 10),
    "resnet18": (lambda: ResNet(class_dim=100, layers=18), (8, 3, 64, 64), 100),
}
"""Model, shape of one rank's batch, classes."""


def main() -> None:
    """Train for the given steps and print the figure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--model", choices=WORK, required=True)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    build, shape, classes = WORK[args.model]
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if args.engine == "phalanx":
        import phalanx

        context = phalanx.init()
        rank, world = context.rank, context.world_size
        model, optimizer, _ = phalanx.distribute(model, optimizer)
    else:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
        model = nn.parallel.DistributedDataParallel(model)

    images, labels = torch.randn(shape), torch.randint(classes, (shape[0],))

    def train(steps: int) -> float:
        started = time.perf_counter()
        for _ in range(steps):
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return time.perf_counter() - started

    train(max(3, args.steps // 10))
    torch.distributed.barrier()
    seconds = train(args.steps)
    if rank == 0:
        print("FIGURE " + json.dumps({"samples_per_s": args.steps * shape[0] * world / seconds}))
    if args.engine == "ddp":
        torch.distributed.destroy_process_group()
        # gloo's threads can hang or abort the interpreter's own shutdown; our launcher's ranks end this way too.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
