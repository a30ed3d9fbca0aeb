"""One rank of `bench_replicas`: trains cases for some updates each; rank 0 prints the SHA-256 of the weights."""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from examples.resnet.model import ResNet

REPLICAS, GLOBAL, SAMPLES, SEED = 4, 24, 500, 7
"""Logical replicas, samples of a global batch, and of an epoch, whose last batch is not full."""


class GPT(nn.Module):
    """A small transformer with dropout."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (batch, classes, tokens)."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.blocks(self.embed(tokens), mask=mask, is_causal=True)).transpose(1, 2)


class Block(nn.Module):
    """A residual block with batch normalisation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the same shape."""
        hidden = F.relu(self.norms[0](self.first(x)))
        return F.relu(x + self.norms[1](self.second(hidden)))


def small_resnet() -> nn.Module:
    """Return a residual net of 5 convolutions, with batch normalisation."""
    start = nn.Conv2d(3, 16, 3, stride=2, bias=False), nn.BatchNorm2d(16), nn.ReLU()
    return nn.Sequential(*start, Block(16), Block(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def small_gpt() -> nn.Module:
    """Return a transformer of 2 layers, with dropout."""
    return GPT(width=32, heads=2)


def mlp() -> nn.Module:
    """Return a net without random numbers or statistics."""
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))


def vectors() -> Dataset[Any]:
    """Return samples of 64 numbers, and classes."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(SAMPLES, 64, generator=generator), torch.randint(10, (SAMPLES,), generator=generator)
    )


def images(size: int = 32) -> Dataset[Any]:
    """Return square images, and classes."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(SAMPLES, 3, size, size, generator=generator), torch.randint(10, (SAMPLES,), generator=generator)
    )


def text(length: int = 32) -> Dataset[Any]:
    """Return token sequences and the tokens that follow."""
    tokens = torch.randint(256, (SAMPLES, length + 1), generator=torch.Generator().manual_seed(0))
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@dataclass(frozen=True)
class Case:
    """What is trained."""

    model: Callable[[], nn.Module]
    data: Callable[[], Dataset[Any]]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    settings: dict[str, Any] = field(default_factory=dict)
    clip: float | None = None


def resnet() -> nn.Module:
    """Return ResNet-18, with batch normalisation."""
    return ResNet(class_dim=10, layers=18)


def _zero(stage: int) -> dict[str, Any]:
    return {"sharding": True, "sharding_configs": {"stage": stage}}


TECHNIQUES: dict[str, dict[str, Any]] = {"": {}, " zero 1": _zero(1), " zero 3": _zero(3), " compiled": {"graph": True}}
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Dataset[Any]]]] = {
    "mlp": (mlp, vectors),
    "resnet": (small_resnet, partial(images, 12)),
    "gpt": (small_gpt, partial(text, 16)),
}
CASES = {
    f"{name} {rule}{technique}": Case(*model, sgd if clip is None else adamw, settings, clip=clip)
    for name, model in MODELS.items()
    for rule, clip in (("sgd", None), ("adamw clip", 1.0))
    for technique, settings in TECHNIQUES.items()
}
"""The matrix: every model with every optimizer and technique."""

COSTS = {
    "mlp sgd": CASES["mlp sgd"],
    "resnet18 batch norm": Case(resnet, images, sgd),
    "gpt dropout adamw clip": Case(GPT, text, adamw, clip=1.0),
}
"""What an update of replicas is timed with."""


def digest(state: dict[str, Tensor]) -> str:
    """Return the SHA-256 of full weights and buffers."""
    summary = hashlib.sha256()
    for name, value in sorted(state.items()):
        summary.update(name.encode() + value.contiguous().numpy().tobytes())
    return summary.hexdigest()


def train(model: nn.Module, loader: Any, step: Callable[[], bool], steps: int, *, clip: float | None = None) -> None:
    """Train for a number of updates, over as many epochs as it takes."""
    done = epoch = 0
    while done < steps:
        if isinstance(getattr(loader, "sampler", None), DistributedSampler):
            loader.sampler.set_epoch(epoch)
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            done += step()
            if done == steps:
                break
        epoch += 1


def with_phalanx(name: str, case: Case, args: argparse.Namespace) -> tuple[str, float]:
    """Train with us; return the digest and the seconds of an update."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    import phalanx as px
    from phalanx.parallel.step.gate import has_updated

    settings = dict(case.settings)
    if case.clip is not None:
        settings |= {"clip": True, "clip_configs": {"norm": case.clip}}
    torch.manual_seed(SEED)
    model = case.model()
    model, optimizer, loader = px.distribute(
        model,
        case.optimizer(model),
        case.data(),
        global_batch=GLOBAL,
        strategy=px.DistributedStrategy(**settings),
        replicas=args.replicas or None,
        seed=SEED,
    )
    assert optimizer is not None
    if args.load:
        px.load(args.load / name, model, optimizer, loader)

    def step() -> bool:
        optimizer.step()
        optimizer.zero_grad()
        return has_updated(optimizer)

    warm = min(args.warm, args.steps)
    train(model, loader, step, warm)
    started = time.perf_counter()
    train(model, loader, step, args.steps - warm)
    seconds = (time.perf_counter() - started) / max(args.steps - warm, 1)
    if args.save:
        px.save(args.save / name, model, optimizer, loader)
    state: Any = model.state_dict()
    if any(hasattr(value, "placements") for value in state.values()):
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return digest(state) if px.current().rank == 0 else "", seconds


def with_ddp(_name: str, case: Case, args: argparse.Namespace) -> tuple[str, float]:
    """Train with torch DDP, each rank its part of the global batch, as its tutorial does."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(SEED)
    model = case.model()
    optimizer = case.optimizer(model)
    parallel: nn.Module = nn.parallel.DistributedDataParallel(model)
    data = case.data()
    sampler: Any = DistributedSampler(data, seed=SEED)  # type: ignore[arg-type]
    loader = DataLoader(data, GLOBAL // dist.get_world_size(), sampler=sampler)
    if case.settings.get("graph"):
        parallel.compile()

    def step() -> bool:
        optimizer.step()
        optimizer.zero_grad()
        return True

    started = time.perf_counter()
    train(parallel, loader, step, args.steps, clip=case.clip)
    return digest(model.state_dict()), (time.perf_counter() - started) / args.steps


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=("phalanx", "ddp"), required=True)
    parser.add_argument("--cases", required=True, help="which, separated by commas")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warm", type=int, default=0)
    parser.add_argument("--replicas", type=int, default=REPLICAS)
    parser.add_argument("--load", type=Path)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    run = with_phalanx if args.engine == "phalanx" else with_ddp
    for name in args.cases.split(","):
        sha256, seconds = run(name, (CASES | COSTS)[name], args)
        if int(os.environ.get("RANK", "0")) == 0:
            print("FIGURE " + json.dumps({"case": name, "sha256": sha256, "seconds": seconds}), flush=True)
        gc.collect()  # the next strategy may be another
        torch.compiler.reset()
    if args.engine == "ddp":
        torch.distributed.destroy_process_group()
        # gloo's threads can hang or abort the interpreter's own shutdown; our launcher's ranks end this way too.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
