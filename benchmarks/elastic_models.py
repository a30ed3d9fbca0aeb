"""`OneModel`, `Adversaries`: what `elastic_rank` trains, and the data: one model, or two with an optimizer each."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

SEED = 7


class Samples(Dataset[Any]):
    """Vectors with their class and their number."""

    def __init__(self, count: int, width: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(count, width, generator=generator)
        self.y = torch.randint(10, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.x[index], self.y[index], index


class Net(nn.Module):
    """Batch norm, dropout, and a point in the backward pass where a rank may end."""

    def __init__(self, width: int, hidden: int, outputs: int = 10) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(hidden, outputs)
        self.reach: Callable[[str], None] = lambda _point: None

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        hidden = self.body(x)
        self.reach("forward")
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self.reach("backward"))
        return self.head(hidden)


def digest(*models: nn.Module) -> str:
    """Return the SHA-256 of weights and buffers."""
    summary = hashlib.sha256()
    for model in models:
        for name, value in sorted(model.state_dict().items()):
            summary.update(name.encode() + value.detach().contiguous().numpy().tobytes())
    return summary.hexdigest()


def nets_of(adversaries: bool, width: int, hidden: int) -> dict[str, Net]:
    """Return the models of a training by the folder of their checkpoints, with the first weights."""
    torch.manual_seed(SEED)
    if not adversaries:
        return {"checkpoints": Net(width, hidden)}
    return {"checkpoints/critic": Net(width, hidden), "checkpoints/generator": Net(width, hidden, width)}


class OneModel:
    """The models, optimizers and data of a training, distributed, and how it computes.

    Args:
        args: Of `elastic_rank`.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        import phalanx as px

        strategy = px.DistributedStrategy(sharding=args.sharding, sharding_configs={"mirror": args.mirror})
        self._nets = nets_of(args.adversaries, args.width, args.hidden)
        self._folder = args.folder
        self.models = list(self._nets.values())
        self.optimizers: list[Any] = [torch.optim.AdamW(net.parameters(), lr=1e-3) for net in self.models]
        data = Samples(args.samples, args.width)
        *_, self.loader = px.distribute(
            self.models[0], self.optimizers[0], data, global_batch=args.batch, seed=SEED, strategy=strategy
        )
        for pair in list(zip(self.models, self.optimizers, strict=True))[1:]:
            px.distribute(*pair)
        # Slow enough that a sample which is lost late changes bits.
        schedulers = [torch.optim.lr_scheduler.StepLR(each, 7, 0.97) for each in self.optimizers]
        self._schedulers = [px.follow_updates(each) for each in schedulers]

    @property
    def updates(self) -> int:
        """Updates of the training, those of the runs before a checkpoint included."""
        return int(self._schedulers[0].last_epoch)

    def compute(self, x: Tensor, y: Tensor) -> None:
        """Compute gradients."""
        F.cross_entropy(self.models[0](x), y).backward()

    def update(self, reach: Callable[[str], None]) -> None:
        """Make a step of every optimizer."""
        for model, optimizer, scheduler in zip(self.models, self.optimizers, self._schedulers, strict=True):
            if optimizer is not self.optimizers[0]:
                reach("between")
            torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
            optimizer.step()
            scheduler.step()

    def save(self) -> None:
        """Write a checkpoint of each model."""
        import phalanx as px

        for number, folder in enumerate(self._nets):
            loader = None if number else self.loader
            training = self.models[number], self.optimizers[number], loader
            px.save(self._folder / folder, *training, scheduler=self._schedulers[number], keep=2, step=self.updates)

    def resume(self) -> None:
        """Begin with the newest checkpoint that there is of all models, or of a peer; with none, at the start."""
        import phalanx as px

        step = max(set.intersection(*(complete_steps(self._folder / folder) for folder in self._nets)), default=None)
        for number, folder in enumerate(self._nets if step is not None else ()):
            path, loader = self._folder / folder / f"step-{step}", None if number else self.loader
            px.load(path, self.models[number], self.optimizers[number], loader, scheduler=self._schedulers[number])


class Adversaries(OneModel):
    """A generator and its critic, which also tells classes: two optimizers step after one backward pass."""

    def compute(self, x: Tensor, y: Tensor) -> None:
        """Compute gradients of both."""
        critic, generator = self.models
        fake = generator(torch.randn_like(x))
        of_critic = F.cross_entropy(critic(x), y) + F.softplus(critic(fake.detach())[:, 0]).mean()
        critic.requires_grad_(False)
        of_generator = F.softplus(-critic(fake)[:, 0]).mean()
        critic.requires_grad_(True)
        (of_critic + of_generator).backward()


def complete_steps(folder: Path) -> set[int]:
    """Return the steps of the complete checkpoints in a folder."""
    from phalanx.checkpoint.folder.marker import COMPLETE

    return {int(path.parent.name.removeprefix("step-")) for path in folder.glob(f"step-*/{COMPLETE}")}
