"""One rank of `bench_plans`: train every Plan of a file for some steps, in some rounds, and print what a step takes."""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as px
from phalanx.auto.capture.step import capture
from phalanx.parallel.session import session
from phalanx.plan.value import Plan


class Block(nn.Module):
    """Attention and a multi-layer perceptron, each on top of a norm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return what comes out, of the shape of `x`: (rows, places, width)."""
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Scores of the next of 512 tokens."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.tokens = nn.Embedding(512, width)
        self.blocks = nn.ModuleList(Block(width, 8) for _ in range(3))
        self.head = nn.Linear(width, 512)

    def forward(self, ids: Tensor) -> Tensor:
        """Return scores of shape (rows, places, 512)."""
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class GPT(nn.Module):
    """Scores of the next of some tokens, from fused queries, keys and values: most parameters are of the words.

    Args:
        words: Number of them.
        tied: Whether scores come from the words' own table.
    """

    def __init__(self, words: int = 4096, *, tied: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, 192), nn.Embedding(64, 192)
        self.blocks = nn.ModuleList(FusedBlock(192, 6) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(192), nn.Linear(192, words)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return scores of shape (rows, places, words)."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class FusedBlock(nn.Module):
    """A block of GPT-2, whose queries, keys and values are one layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return what comes out, of the shape of `x`: (rows, places, width)."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class AlexNet(nn.Module):
    """AlexNet (Krizhevsky, arXiv:1404.5997) for images of 64 x 64, its layers half as wide, or as wide as is asked."""

    def __init__(self, width: int = 2048) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 32, 5, stride=2, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 96, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(96, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.classifier = nn.Sequential(
            nn.Linear(2048, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 100)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return scores of shape (rows, 100)."""
        scores: Tensor = self.classifier(torch.flatten(self.features(images), 1))
        return scores


def of_tokens(scores: Tensor, ids: Tensor) -> Tensor:
    """Return the cross entropy of all places."""
    return F.cross_entropy(scores.flatten(0, 1), ids.flatten())


Loss = Callable[[Any, Any], Tensor]
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]], Loss]] = {
    "transformer": (
        Transformer,
        lambda: (torch.randint(512, (16, 64)), torch.randint(512, (16, 64))),
        of_tokens,
    ),
    "gpt": (GPT, lambda: (torch.randint(4096, (16, 64)), torch.randint(4096, (16, 64))), of_tokens),
    "alexnet": (AlexNet, lambda: (torch.randn(16, 3, 64, 64), torch.randint(100, (16,))), F.cross_entropy),
}
"""How to make a model and a global batch, and its loss."""


class Yardstick:
    """Work that is the same beside every Plan: how fast the processor is just now, whoever else is on the host."""

    def __init__(self) -> None:
        self._square, self._line = torch.ones(256, 256), torch.ones(2**20)

    def seconds(self) -> float:
        """Return what some products and some passes over memory take, in the processor's time."""
        started = time.process_time()
        for _ in range(6):
            torch.mm(self._square, self._square)
            torch.relu(self._line)
        return time.process_time() - started


def step_of(plan: Plan, name: str, steps: int, yardstick: Yardstick) -> tuple[float, float, float]:
    """Train under one Plan; return the median seconds of a step, of the yardstick, and page faults. Collective."""
    make, batch, loss_fn = MODELS[name]
    torch.manual_seed(0)
    model, data = make(), batch()
    if plan.ops:
        capture(model, data, loss_fn)  # which operators are placed is said of the captured step
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rows = torch.utils.data.TensorDataset(*data)
    model, optimizer, loader = px.distribute(model, optimizer, rows, global_batch=len(rows), shuffle=False, plan=plan)
    inputs, target = next(iter(loader))
    times, beside, faults = [], [], 0
    for step in range(steps + 2):
        if step == 2:
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        px.comm.barrier()
        beside.append(yardstick.seconds())
        px.comm.barrier()
        started = time.perf_counter()
        optimizer.zero_grad()
        loss_fn(model(inputs), target).backward()
        optimizer.step()
        times.append(time.perf_counter() - started)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    del model, optimizer, loader
    session.reset()  # the next Plan is another job
    gc.collect()
    return statistics.median(times[2:]), statistics.median(beside[2:]), faults / steps


def main() -> None:
    """Print what a step takes under every Plan in every round: on the slowest rank, and on rank 0 beside it.

    The Plans of a round stand in an order of its own, the same on all ranks, so that what slows the machine down for a
    while does not always meet the same ones.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--plans", type=Path, required=True)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--rounds", type=int, nargs="+", required=True, help="numbers of the rounds")
    options = parser.parse_args()
    px.init()
    plans = [Plan.model_validate(fields) for fields in json.loads(options.plans.read_text())]
    figures: list[list[tuple[float, ...]]] = [[] for _ in plans]
    yardstick = Yardstick()
    for number in options.rounds:
        for place in random.Random(number).sample(range(len(plans)), len(plans)):
            seconds, *beside = step_of(plans[place], options.model, options.steps, yardstick)
            figures[place].append((px.comm.all_reduce(torch.tensor(seconds), "max").item(), *beside))
    if px.current().rank == 0:
        print("STEPS " + json.dumps(figures))


if __name__ == "__main__":
    main()
