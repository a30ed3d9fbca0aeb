"""Models whose layers run out of memory where a test says, and the bits of what they trained."""

from __future__ import annotations

import hashlib
import resource
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def limit_memory() -> None:
    """Give this process a limit, far away: without one allocations cannot fail, and nothing is guarded."""
    resource.setrlimit(resource.RLIMIT_AS, (1 << 46, resource.RLIM_INFINITY))


MESSAGE = "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to allocate 400 bytes."


class Trap(nn.Module):
    """Passes its input on; raises, once, at the pass that is set."""

    phase = ""
    """Of which passes: "forward" or "backward"; empty where none raises."""

    left = 0
    """How many traps are passed until one raises."""

    def forward(self, x: Tensor) -> Tensor:
        Trap.step_on("forward")
        return _BackwardTrap.apply(x)  # type: ignore[no-any-return, no-untyped-call]

    @classmethod
    def set(cls, phase: str, number: int) -> None:
        cls.phase, cls.left = phase, number

    @classmethod
    def step_on(cls, phase: str) -> None:
        if cls.phase == phase:
            cls.left -= 1
            if cls.left == 0:
                cls.phase = ""
                raise RuntimeError(MESSAGE)


class _BackwardTrap(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, *gradients: Any) -> Any:
        Trap.step_on("backward")
        return gradients[0]


class NormBlock(nn.Module):
    """Residual, with batch norm and dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), Trap(), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(0.2), Trap()
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.layers(x))


def images() -> tuple[nn.Module, Tensor, Tensor]:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), *[NormBlock(4) for _ in range(3)], nn.Flatten(), nn.Linear(4 * 16, 4))
    return net, torch.randn(96, 3, 6, 6), torch.randint(0, 4, (96,))


def rows() -> tuple[nn.Module, Tensor, Tensor]:
    """A chain of single layers, of which the first half is one block."""
    layers = [part for _ in range(3) for part in (nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Dropout(0.2), Trap())]
    return (
        nn.Sequential(nn.Linear(8, 8), Trap(), *layers, nn.Linear(8, 4)),
        torch.randn(96, 8),
        torch.randint(0, 4, (96,)),
    )


class CausalBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), Trap(), nn.GELU(), nn.Linear(4 * width, width), Trap())
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y, mask = self.norm1(x), nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        x = x + self.dropout(self.attention(y, y, y, attn_mask=mask, need_weights=False)[0])
        return x + self.dropout(self.mlp(self.norm2(x)))


class CausalModel(nn.Module):
    """A small GPT, whose head shares the table of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(20, 16), nn.ModuleList([CausalBlock(16) for _ in range(3)])
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x)
        for block in self.blocks:
            y = block(y)
        return self.head(y).transpose(1, 2)


def text() -> tuple[nn.Module, Tensor, Tensor]:
    x = torch.randint(0, 20, (96, 6))
    return CausalModel(), x, x.roll(-1, 1)


MODELS = {"images": images, "rows": rows, "text": text}


def digest(net: nn.Module) -> str:
    """Return the SHA-256 of a model's parameters and buffers."""
    whole = hashlib.sha256()
    for value in net.state_dict().values():
        whole.update(value.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()
