"""Train AlexNet, convolutions data parallel and fully connected layers tensor parallel, on random images.

python examples/alexnet_hybrid/train.py
phalanx run -n 2 examples/alexnet_hybrid/train.py --optimizer sgd --dropout 0

Each rank computes the convolutions of its own images. The fully connected layers, which have nearly all parameters,
are sharded: each rank holds some of their outputs, and computes them for the images of all ranks. With --dropout 0 the
losses are those of one process with the same global batch; with dropout each rank has its own random stream.
"""

import argparse
import json
import time

import torch
import torch.nn.functional as F
from model import IMAGE, AlexNet
from torch import Tensor
from torch.utils.data import Dataset

import phalanx as px

CLASSES = 10
"""Classes of the random labels; the model has 1000."""


class RandomImages(Dataset[tuple[Tensor, Tensor]]):
    """Image i is the same on every rank."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        image = torch.randn(IMAGE, generator=generator)
        return image, torch.randint(0, CLASSES, (), generator=generator)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", choices=("adam", "sgd"), default="adam")
    parser.add_argument("--lr", type=float, default=None, help="default: 0.001 for adam, 0.01 for sgd")
    parser.add_argument("--dropout", type=float, default=0.5, help="0: same result on any number of ranks")
    parser.add_argument("--device-batch", type=int, default=1, help="images per step and rank")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--smoke", action="store_true", help="two steps only")
    args = parser.parse_args()
    if not 0 <= args.dropout < 1:
        parser.error(f"--dropout {args.dropout} should be at least 0 and less than 1")
    if args.device_batch < 1 or args.steps < 1:
        parser.error("--device-batch and --steps should be at least 1")
    if args.smoke:
        args.steps = 2
    return args


def make_optimizer(args: argparse.Namespace, model: AlexNet) -> torch.optim.Optimizer:
    if args.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=args.lr or 0.001)
    return torch.optim.SGD(model.parameters(), lr=args.lr or 0.01)


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    context = px.init()
    is_first = context.rank == 0

    model = AlexNet(dropout=args.dropout)
    px.shard(model, {"classifier.*": "column"}, axis="data")
    optimizer = make_optimizer(args, model)
    global_batch = args.device_batch * context.world_size
    images = RandomImages(global_batch * args.steps, args.seed)
    model, optimizer, loader = px.distribute(model, optimizer, images, global_batch=global_batch, shuffle=False)
    explanation = px.explain(model, torch.zeros(1, *IMAGE, device=context.device))
    if is_first:
        print(explanation)

    torch.manual_seed(args.seed + context.rank)  # each rank drops units of its own images
    started, rows, loss = time.perf_counter(), 0, float("nan")
    for step, (image, label) in enumerate(loader):
        own = F.cross_entropy(model(image), label)
        optimizer.zero_grad()
        own.backward()
        optimizer.step()
        loss = px.global_mean(own).item()
        rows += context.batch.global_rows
        if is_first:
            print(f"step:{step}\tloss:{loss:.6f}")
    seconds = time.perf_counter() - started

    if is_first:
        result = {
            "loss": round(loss, 6),
            "samples_per_s": round(rows / seconds, 2),
            "world_size": context.world_size,
            "steps": args.steps,
        }
        print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
