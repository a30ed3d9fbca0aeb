"""A training script that computes something wrong when asked to: `wrong_numbers_rank.py --fault NAME`.

Plain torch.distributed, DDP or px.distribute, by `--engine`. The global batch has the same 16 samples on any number of
ranks. Faults of a rank strike rank 1, faults of a step step 2.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

SAMPLES, GLOBAL, FEATURES, CLASSES = 96, 16, 12, 5
STEP, RANK = 2, 1
BAD_SAMPLE = 37


class Scale(nn.Module):
    """Multiplies by a number that a fault changes on one rank."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return x * self.factor


class Deep(nn.Module):
    """Has functions inside that make NaN of some numbers."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        if self.fault == "nan deep inside":
            return x + 0.0 * torch.log(x - x.amin() - 1e-9)
        if self.fault == "nan beside a mask":
            weights = x.masked_fill(x > 0, -torch.inf).softmax(1)
            return weights + 0.0 * torch.log(x - x.amin() - 1e-9)
        if self.fault == "nan in backward":
            return x + (x.relu() - x.relu()).sqrt()
        if self.fault == "division by zero":
            return x / (x.sum(1, keepdim=True) * 0.0)
        return x


class Net(nn.Module):
    """A small classifier with what faults need."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.first = nn.Linear(FEATURES, 24)
        self.norm: nn.Module = nn.BatchNorm1d(24) if fault == "batch norm" else nn.LayerNorm(24)
        self.drop = nn.Dropout(0.3 if fault in ("dropout", "dropout seed") else 0.0)
        self.scale = Scale()
        self.deep = Deep(fault)
        self.second = nn.Linear(24, 24)
        self.extra = nn.Linear(24, 24)
        self.head = nn.Linear(24, CLASSES)
        self.uses_extra = True

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        x = self.norm(self.first(x)).relu()
        x = self.deep(self.scale(self.drop(x)))
        x = self.second(x).tanh()
        if self.uses_extra:
            x = x + 0.5 * self.extra(x)
        return self.head(x)  # type: ignore[no-any-return]


class Job:
    """One rank of the training."""

    def __init__(self, fault: str, engine: str, folder: str = "", strategy: Any = None) -> None:
        self.fault, self.engine, self.folder, self.strategy = fault, engine, folder, strategy
        self.at = 0
        self.rank, self.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.is_struck = self.rank == RANK and self.world > 1
        torch.manual_seed(self.rank if fault == "wrong seed" else 0)
        if fault == "seed from clock":
            torch.seed()
        self.net = Net(fault)
        self.data = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(1))
        self.labels = torch.randint(0, CLASSES, (SAMPLES,), generator=torch.Generator().manual_seed(2))
        if fault == "inf in one sample":
            self.data[BAD_SAMPLE, 3] = torch.inf
        if fault == "nan label weight":
            self.weight = torch.tensor([1.0, torch.nan, 1.0, 1.0, 1.0])
        if fault == "frozen on one rank" and self.is_struck:
            self.net.second.weight.requires_grad_(False)
        if fault == "other forward on one rank" and self.is_struck:
            self.net.scale.factor = 1.01
        lr = 0.1
        if fault == "rate by rank" and self.is_struck:
            lr = 0.01
        if fault == "rate by world" and self.world > 1:
            lr = 0.2
        if fault == "exploding":
            lr = 3e38
        self.optimizer: Any = torch.optim.SGD(
            self.net.parameters(), lr=lr, momentum=0.0 if fault == "exploding" else 0.9
        )

    def run(self, steps: int) -> None:
        """Train."""
        if self.engine == "px":
            self.run_distributed(steps)
            return
        dist.init_process_group("gloo")
        model: Any = DistributedDataParallel(self.net) if self.engine == "ddp" else self.net
        for step in range(steps):
            self.step(model, step)
        dist.destroy_process_group()

    def run_distributed(self, steps: int) -> None:
        """Train with px.distribute."""
        import phalanx as px

        data = torch.utils.data.TensorDataset(self.data, self.labels)
        self.net.second.weight.register_hook(self.strike_own_gradient)
        model, optimizer, loader = px.distribute(
            self.net, self.optimizer, data, global_batch=GLOBAL, strategy=self.strategy
        )
        saver = px.Checkpointer(self.folder, model, optimizer, loader, every=2) if self.folder else None
        if saver is not None:
            saver.resume()
            self.at = saver.steps
        while self.at < steps:
            for x, y in loader:
                optimizer.zero_grad()
                self.loss(model(x), y).backward()
                self.strike_gradients(self.at)
                optimizer.step()
                if px.has_updated(optimizer):
                    self.at += 1
                    if saver is not None:
                        saver.step()
                    if self.at >= steps:
                        break
        if saver is not None:
            saver.close()

    def strike_own_gradient(self, gradient: Tensor) -> Tensor:
        """Change a gradient before the reduction, as a broken processor would."""
        if self.fault != "flipped bit of a replica" or self.at != STEP or not self.is_struck:
            return gradient
        gradient = gradient.clone()
        gradient.view(torch.int32)[3, 7] ^= 1 << 22
        return gradient

    def step(self, model: Any, step: int) -> None:
        """Make one step of a plain loop."""
        x, y = self.batch(step)
        self.net.uses_extra = not (self.fault == "used on one rank only" and self.is_struck)
        self.optimizer.zero_grad()
        is_left_on = self.fault == "no_sync left on" and step >= STEP and self.world > 1
        with model.no_sync() if is_left_on else contextlib.nullcontext():
            self.loss(model(x), y).backward()
        if self.engine == "loop":
            self.reduce(len(x))
        self.strike_gradients(step)
        self.optimizer.step()
        self.strike_weights(step)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return this rank's rows of a global batch."""
        seed = 5 + (self.rank if self.fault == "shuffled by rank" else 0)
        seed += self.world if self.fault == "shuffled by world" else 0
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(seed))
        size = GLOBAL * (self.world if self.fault == "batch per rank" else 1)
        rows = order.repeat(4)[step * size : (step + 1) * size]
        if self.fault != "not sharded":
            cut = size // self.world
            uneven = 3 if self.fault == "uneven batch" and self.world > 1 else 0
            bounds = [0, *((rank + 1) * cut + uneven for rank in range(self.world - 1)), size]
            rows = rows[bounds[self.rank] : bounds[self.rank + 1]]
        if self.fault == "other samples" and step == STEP and self.is_struck:
            rows = (rows + 1) % SAMPLES
        x, y = self.data[rows], self.labels[rows]
        if self.fault == "labels of other rows" and self.is_struck:
            y = y.roll(1)
        if self.fault == "unseeded augmentation":
            x = x + 0.01 * torch.randn(x.shape, generator=torch.Generator().manual_seed(self.rank * 7 + self.world))
        return x, y

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the loss of this rank's rows."""
        loss = F.cross_entropy(output, y, weight=getattr(self, "weight", None))
        if self.fault == "exploding":
            loss = loss * 1e6
        if self.fault == "loss divided by world":
            loss = loss / self.world
        if self.fault == "penalty":
            loss = loss + 1e-3 * self.net.head.weight.square().sum()
        if self.fault == "detached on one rank" and self.is_struck:
            hidden = self.net.head.weight
            loss = loss - 0.5 * (hidden.square().sum() - hidden.detach().square().sum())
        return loss

    def reduce(self, rows: int) -> None:
        """Average gradients over the ranks, as a script does that has no DDP."""
        if self.fault == "missing all-reduce":
            return
        if self.fault == "clipped before the reduction" and self.world > 1:
            nn.utils.clip_grad_norm_(self.net.parameters(), 0.05 + 0.05 * self.rank)
        weight = rows * self.world / GLOBAL if self.fault != "uneven batch" else 1.0
        for name, param in self.net.named_parameters():
            if self.fault == "bias left out" and name == "head.bias":
                continue
            if self.fault == "used on one rank only" and name.startswith("extra"):
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
                continue
            grad = torch.zeros_like(param) if param.grad is None else param.grad * weight
            if self.fault == "bfloat16 on the wire" and self.world > 1:
                grad = grad.bfloat16().float()
            dist.all_reduce(grad)
            if param.requires_grad:
                param.grad = grad / {"summed": 1, "divided twice": self.world**2}.get(self.fault, self.world)

    def strike_gradients(self, step: int) -> None:
        """Change a gradient after the reduction, as broken memory would."""
        if step != STEP or not self.is_struck:
            return
        if self.fault == "flipped bit":
            grad = self.net.second.weight.grad
            assert grad is not None
            grad.view(torch.int32)[3, 7] ^= 1 << 22
        if self.fault == "corrupt bucket":
            grad = self.net.first.weight.grad
            assert grad is not None
            grad[2:5] *= 1.5

    def strike_weights(self, step: int) -> None:
        """Change a weight between two steps."""
        if self.fault == "weight written on one rank" and step == STEP and self.is_struck:
            with torch.no_grad():
                self.net.extra.bias[0] += 0.5


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", default="")
    parser.add_argument("--engine", choices=("loop", "ddp", "px"), default="loop")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--folder", default="", help="Checkpoints, of px.distribute.")
    options = parser.parse_args()
    Job(options.fault, options.engine, options.folder).run(options.steps)


if __name__ == "__main__":
    main()
