"""Train a small convolutional network on MNIST with plain torch.distributed, gradients averaged by hand.

python examples/mnist_ddp/train.py
phalanx run -n 2 examples/mnist_ddp/train.py --data DIR
torchrun --standalone --nproc-per-node 2 examples/mnist_ddp/train.py

This script does not import Phalanx: any launcher that sets RANK and WORLD_SIZE can start it. The global
batch does not depend on the number of ranks, and with --dropout 0 neither do the losses.
"""

import argparse
import datetime
import gc
import json
import logging
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from mnist import Images, InputError, read_data


class DistributedDataParallel(nn.Module):
    """Start every rank from rank 0's weights, and average the gradients when a backward pass ends.

    All gradients of one dtype are sent in one flat all-reduce. Every rank must run the same number of backward passes.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.is_first_call = True
        self.needs_average = False
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._queue_average)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        if self.is_first_call:
            self._broadcast_weights()
            self.is_first_call = False
        self.needs_average = True
        output: torch.Tensor = self.module(*inputs)
        return output

    def _broadcast_weights(self) -> None:
        logging.info("first broadcast start")
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            dist.broadcast(tensor.detach(), src=0)
        logging.info("first broadcast done")

    def _queue_average(self, _: torch.Tensor) -> None:
        # The first gradient of a pass asks the engine for one call after the last one.
        if self.needs_average:
            self.needs_average = False
            torch.autograd.Variable._execution_engine.queue_callback(self._average_gradients)

    def _average_gradients(self) -> None:
        buckets: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:  # unused here, but maybe not on other ranks, whose all-reduce must match
                    parameter.grad = torch.zeros_like(parameter)
                buckets[parameter.dtype].append(parameter.grad)
        for gradients in buckets.values():
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            parts = flat.split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d(dropout)
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        x = F.dropout(x, self.dropout, training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)


class GlobalBatches:
    """This rank's samples of each global batch. The global batch does not depend on the number of ranks."""

    def __init__(self, count: int, global_batch: int, rank: int, world_size: int, seed: int) -> None:
        self.count, self.global_batch, self.seed = count, global_batch, seed
        self.rank, self.world_size = rank, world_size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the order of the next epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return math.ceil(self.count / self.global_batch)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        for batch in order.split(self.global_batch):
            yield batch.tensor_split(self.world_size)[self.rank], len(batch)  # 128 over 3 ranks: 43 + 43 + 42


def train_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: GlobalBatches, images: Images, most: int | None
) -> tuple[float, int, int]:
    """Train on at most `most` batches. Returns their mean loss over all ranks, their number, and their samples."""
    model.train()
    total = torch.zeros((), dtype=torch.float64, device=images.labels.device)
    steps = seen = 0
    for rows, global_rows in islice(batches, most):
        optimizer.zero_grad()
        pixels, labels = images.batch(rows)
        loss = F.nll_loss(model(pixels), labels, reduction="sum") / global_rows
        # The wrapper averages over ranks. This rank's part of the mean over the global batch is multiplied by
        # the world size, so that every sample has the same weight however the batch is split.
        (loss * batches.world_size).backward()
        optimizer.step()
        total += loss.detach()
        steps, seen = steps + 1, seen + global_rows
    dist.all_reduce(total)
    return total.item() / steps, steps, seen


@torch.no_grad()
def accuracy(model: nn.Module, images: Images) -> float:
    """Return the accuracy on the test images; each rank evaluates some of them, none twice."""
    model.eval()
    correct = torch.zeros((), dtype=torch.long, device=images.labels.device)
    for start in range(1000 * dist.get_rank(), len(images.labels), 1000 * dist.get_world_size()):
        pixels, labels = images.batch(slice(start, start + 1000))
        correct += (model(pixels).argmax(1) == labels).sum()
    dist.all_reduce(correct)
    return correct.item() / len(images.labels)


def run(args: argparse.Namespace, train: Images, test: Images, device: torch.device) -> dict[str, float]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed + rank)  # dropout differs between ranks; the weights are rank 0's
    train, test = Images(*(part.to(device) for part in train)), Images(*(part.to(device) for part in test))
    net = Net(args.dropout).to(device)
    on_gpu = device.type == "cuda"
    model = nn.parallel.DistributedDataParallel(net, [device]) if on_gpu else DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    batches = GlobalBatches(len(train.labels), args.global_batch, rank, world_size, args.seed)
    logging.info("num_batches = %s", len(batches))

    started, steps, seen, loss = time.perf_counter(), 0, 0, math.nan
    for epoch in range(args.epochs):
        if steps == args.steps:
            break
        batches.set_epoch(epoch)
        left = None if args.steps is None else args.steps - steps
        loss, more_steps, rows = train_epoch(model, optimizer, batches, train, left)
        steps, seen = steps + more_steps, seen + rows
        words = "Epoch %s Loss %.6f Global batch size %s on %s ranks"
        logging.info(words, epoch, loss, args.global_batch, world_size)
    seconds = time.perf_counter() - started
    logging.info("%s training time= %s", "GPU" if on_gpu else "CPU", datetime.timedelta(seconds=seconds))
    result = {"loss": loss, "test_acc": accuracy(net, test), "samples_per_s": round(seen / seconds, 1)}
    return result | {"world_size": world_size, "steps": steps}


def rank_and_world_size() -> tuple[int, int]:
    """Read rank and world size from the environment; a single process if they are not set."""
    rank, world_size = os.environ.get("RANK", "unset"), os.environ.get("WORLD_SIZE", "unset")
    if rank == world_size == "unset":
        return 0, 1
    if not (rank.isdecimal() and world_size.isdecimal() and int(rank) < int(world_size)):
        raise InputError(f"RANK={rank} is no rank of WORLD_SIZE={world_size}. Set both, or neither for one process.")
    return int(rank), int(world_size)


def choose_device(gpu: bool, rank: int) -> torch.device:
    if not gpu:
        return torch.device("cpu")
    logging.info("======= CUDA INFO =======")
    logging.info("CUDA available: %s", torch.cuda.is_available())
    if not torch.cuda.is_available():
        logging.info("=========================")
        logging.warning("--gpu was given, but torch finds no CUDA device: training on the CPU.")
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    gpu = int(os.environ.get("LOCAL_RANK", rank % gpus))
    if gpu >= gpus:
        raise InputError(f"Local rank {gpu} needs its own GPU, but this node has {gpus}. Start fewer ranks.")
    logging.info("CUDA device name: %s", torch.cuda.get_device_name(gpu))
    logging.info("CUDA version: %s", torch.version.cuda)
    logging.info("=========================")
    torch.cuda.set_device(gpu)
    return torch.device("cuda", gpu)


def join_ranks(device: torch.device, rank: int, world_size: int) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "MASTER_ADDR" not in os.environ and world_size == 1:
        alone = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=alone, rank=0, world_size=1)
    else:
        dist.init_process_group(backend, init_method="env://", rank=rank, world_size=world_size)


def parse_arguments() -> argparse.Namespace:
    def positive(text: str) -> int:
        if not text.isdecimal() or int(text) == 0:
            raise argparse.ArgumentTypeError(f"'{text}' should be a whole number, at least 1")
        return int(text)

    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter, allow_abbrev=False)
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="folder with MNIST's IDX files; default: scikit-learn's digits"
    )
    parser.add_argument("--epochs", type=positive, default=10)
    parser.add_argument("--steps", type=positive, help="stop after this many optimizer steps")
    parser.add_argument("--global-batch", type=positive, default=128, help="samples per step over all ranks")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--momentum", type=float, default=0.5)
    parser.add_argument("--dropout", type=float, default=0.5, help="0: same result on any number of ranks")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--gpu", action="store_true", help="use one GPU per rank if CUDA is available")
    parser.add_argument("--smoke", action="store_true", help="a few steps only")
    args = parser.parse_args()
    if not 0 <= args.dropout < 1:
        parser.error(f"--dropout {args.dropout} should be at least 0 and less than 1")
    if args.smoke:
        args.steps = args.steps or 6
    return args


def main() -> None:
    line = "%(levelname)s|%(asctime)s|%(pathname)s|%(lineno)d| %(message)s"
    logging.basicConfig(format=line, datefmt="%Y-%m-%dT%H:%M:%S")
    logging.getLogger().setLevel(logging.INFO)
    args = parse_arguments()
    try:
        rank, world_size = rank_and_world_size()
        # Before the process group is initialised: bad input fails on every rank, and none waits for another.
        train, test = read_data(args.data)
        device = choose_device(args.gpu, rank)
    except InputError as error:
        sys.exit(f"error: {error}")
    join_ranks(device, rank, world_size)
    result = run(args, train, test, device)
    # The model is in a cycle with its hooks. What it shared with the communication threads must be gone
    # before they are, or the interpreter may abort while it shuts down.
    gc.collect()
    dist.destroy_process_group()
    if rank == 0:
        print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
