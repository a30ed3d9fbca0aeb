"""Models, batches and the one-process reference for the tests of tensor parallel."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as px
from phalanx.parallel.optim.clip import clip_grad_norm_
from phalanx.parallel.session import applied_to, session
from phalanx.plan.value import OnRanks, Plan, Shard

STEPS = 3
VOCABULARY, WIDTH, TOKENS = 11, 12, 6

Loss = Callable[[Tensor, Tensor], Tensor]


class Block(nn.Module):
    """Attention and an MLP with residuals; a rank may hold some of the heads."""

    def __init__(self, width: int, heads: int, dropout: float, head_norm: bool) -> None:
        super().__init__()
        self.head_norm = nn.LayerNorm(width // heads) if head_norm else nn.Identity()
        self.head_width = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=bias) for bias in (True, False, True))
        self.o = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * width, width)
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(self.head_norm(q), k, v, is_causal=True)
        x = x + self.drop(self.o(y.transpose(1, 2).flatten(2)))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, dropout: float = 0.0, *, tied: bool = False, head_norm: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, padding_idx=7)
        self.block = Block(WIDTH, 4, dropout, head_norm)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.block(self.tokens(ids))))


def mlp(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 9), nn.Tanh(), nn.Dropout(dropout), nn.Linear(9, 5, bias=True)
    )


BLOCK = {"block.[qkv]": "column", "block.o": "row", "block.mlp.0": "column", "block.mlp.3": "row"}
SEQUENCE = {"*norm[12]": "sequence", "norm": "sequence", "block.drop": "sequence"}


def tokens(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (rows, TOKENS + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def features(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 6, generator=generator).double(), torch.arange(rows) % 5


def whole_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def cut_loss(logits: Tensor, target: Tensor) -> Tensor:
    return px.vocab_cross_entropy(logits, target, axis="model")


@dataclass(frozen=True)
class Case:
    """One model, how it is cut, and on what it trains."""

    build: Callable[[], nn.Module]
    styles: dict[str, str]
    options: dict[str, Any]
    batch: tuple[Callable[[int], tuple[Tensor, Tensor]], int]
    """Rows of a global batch, by their number; there are `STEPS` of them."""

    loss: Loss = whole_loss
    dtype: torch.dtype = torch.float64
    strategy: dict[str, Any] = field(default_factory=dict)
    plan: Plan | None = None
    """Used in place of styles and strategy."""


def made(case: Case) -> tuple[nn.Module, torch.optim.Optimizer, list[Tensor]]:
    torch.manual_seed(0)
    model = case.build().to(case.dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    make, rows = case.batch
    inputs, target = make(rows * STEPS)
    return model, optimizer, [inputs.to(case.dtype) if inputs.is_floating_point() else inputs, target]


def trained_alone(case: Case) -> dict[str, Any]:
    """Train in one process on whole batches."""
    model, optimizer, data = made(case)
    losses, norms, first = [], [], {}
    for inputs, target in zip(*(part.split(case.batch[1]) for part in data), strict=True):
        optimizer.zero_grad()
        loss = whole_loss(model(inputs), target)
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.get_total_norm([param.grad for param in model.parameters()]).item())
        first = first or {name: param.grad.clone() for name, param in model.named_parameters()}
        optimizer.step()
    return {"losses": losses, "norms": norms, "gradients": first, "parameters": dict(model.state_dict())}


def trained(case: Case) -> dict[str, Any]:
    """Train on this job's ranks; gradients and parameters come back whole."""
    px.init()
    model, optimizer, data = made(case)
    if case.plan is None:
        px.shard(model, case.styles, **case.options)
    model, optimizer, loader = px.distribute(
        model,
        optimizer,
        torch.utils.data.TensorDataset(*data),
        global_batch=case.batch[1],
        shuffle=False,
        strategy=px.DistributedStrategy(**case.strategy) if case.plan is None else None,
        plan=case.plan,
    )
    losses, norms, first, sizes = [], [], {}, {}
    for inputs, target in loader:
        optimizer.zero_grad()
        loss = case.loss(model(inputs), target)
        loss.backward()
        losses.append(px.global_mean(loss).item())
        norms.append(clip_grad_norm_(model, 1e9).item())
        sizes = {name: list(param.shape) for name, param in model.named_parameters()}
        first = first or {name: whole(model, name, param.grad) for name, param in model.named_parameters()}
        optimizer.step()
    params = {name: whole(model, name, param) for name, param in model.state_dict().items()}
    shown = repr(model)
    del model, optimizer, loader, loss
    session.reset()
    gc.collect()  # the next case may read its rows another way, under another strategy
    return {
        "losses": losses, "norms": norms, "gradients": first, "parameters": params, "sizes": sizes, "repr": shown
    }  # fmt: skip


def whole(model: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Put the slices of a parameter, or of something shaped like it, together."""
    plan = applied_to(model).plan
    first = {id(param): known for known, param in model.named_parameters()}
    place = plan.rule_for(first[id(model.get_parameter(name))]).place
    assert isinstance(place, OnRanks)
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    for axis, placed in place.layout.items():
        if isinstance(placed, Shard):
            tensor = px.comm.all_gather(tensor.detach(), placed.dim, axis=axis)
    return tensor.detach().clone()


def difference(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """Return the largest difference between two trainings, of losses, norms, and relatively of tensors."""
    worst = max(abs(a - b) for k in ("losses", "norms") for a, b in zip(found[k], expected[k], strict=True))
    for kind in ("gradients", "parameters"):
        assert list(found[kind]) == list(expected[kind])
        for name, tensor in expected[kind].items():
            worst = max(worst, ((found[kind][name] - tensor).norm() / tensor.norm().clamp_min(1e-3)).item())
    return worst
