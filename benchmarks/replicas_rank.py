"""One rank of `bench_replicas`: trains one case for some updates; rank 0 prints the SHA-256 of the weights."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
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

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True, norm_first=True)
        self.embed, self.blocks, self.head = nn.Embedding(256, 64), nn.TransformerEncoder(layer, 2), nn.Linear(64, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (batch, classes, tokens)."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.blocks(self.embed(tokens), mask=mask, is_causal=True)).transpose(1, 2)


def mlp() -> nn.Module:
    """Return a net without random numbers or statistics."""
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))


def vectors() -> Dataset[Any]:
    """Return samples of 64 numbers, and classes."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(SAMPLES, 64, generator=generator), torch.randint(10, (SAMPLES,), generator=generator)
    )


def images() -> Dataset[Any]:
    """Return images of 32 x 32, and classes."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(SAMPLES, 3, 32, 32, generator=generator), torch.randint(10, (SAMPLES,), generator=generator)
    )


def text() -> Dataset[Any]:
    """Return token sequences and the tokens that follow."""
    tokens = torch.randint(256, (SAMPLES, 33), generator=torch.Generator().manual_seed(0))
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


CASES = {
    "mlp sgd": Case(mlp, vectors, sgd),
    "resnet18 batch norm": Case(resnet, images, sgd),
    "gpt dropout adamw clip": Case(GPT, text, adamw, clip=1.0),
    "gpt zero 1 clip": Case(GPT, text, adamw, {"sharding": True, "sharding_configs": {"stage": 1}}, clip=1.0),
    "gpt zero 3 clip": Case(GPT, text, adamw, {"sharding": True, "sharding_configs": {"stage": 3}}, clip=1.0),
    "gpt compiled": Case(GPT, text, adamw, {"graph": True}),
}


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


def with_phalanx(case: Case, args: argparse.Namespace) -> tuple[str, float]:
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
        px.load(args.load, model, optimizer, loader)

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
        px.save(args.save, model, optimizer, loader)
    state: Any = model.state_dict()
    if any(hasattr(value, "placements") for value in state.values()):
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return digest(state) if px.current().rank == 0 else "", seconds


def with_ddp(case: Case, args: argparse.Namespace) -> tuple[str, float]:
    """Train with torch DDP, each rank its part of the global batch, as its tutorial does."""
    import torch.distributed as dist

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
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warm", type=int, default=0)
    parser.add_argument("--replicas", type=int, default=REPLICAS)
    parser.add_argument("--load", type=Path)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    run = with_phalanx if args.engine == "phalanx" else with_ddp
    sha256, seconds = run(CASES[args.case], args)
    if int(os.environ.get("RANK", "0")) == 0:
        print("FIGURE " + json.dumps({"sha256": sha256, "seconds": seconds}), flush=True)
    if args.engine == "ddp":
        torch.distributed.destroy_process_group()
        # gloo's threads can hang or abort the interpreter's own shutdown; our launcher's ranks end this way too.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
