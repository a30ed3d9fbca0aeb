"""A real limit on the memory of one rank of two: the run ends with the weights of a run without it."""

from __future__ import annotations

import ctypes
import gc
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import phalanx as px
from memory_traps import digest
from phalanx.comm.groups import group_of
from phalanx.parallel.memory.free_memory import block_return, free_caches
from ranks import run_ranks

pytestmark = pytest.mark.fault

STEPS = 3
M_ARENA_MAX = -8
"""The number of heaps of malloc, for `mallopt(3)`."""


class WideBlock(nn.Module):
    """Little to compute, much to keep."""

    def __init__(self, around: nn.Module, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), around, nn.GELU(), nn.Dropout(0.1), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def mlp() -> tuple[nn.Module, Tensor, Tensor, int]:
    rows = 16384
    x, y = torch.randn(2 * rows * STEPS, 16), torch.randint(0, 4, (2 * rows * STEPS,))
    blocks = [WideBlock(nn.Dropout(0.1), 64) for _ in range(8)]
    return nn.Sequential(nn.Linear(16, 64), *blocks, nn.Linear(64, 4)), x, y, 2 * rows


def normalised() -> tuple[nn.Module, Tensor, Tensor, int]:
    _net, x, y, batch = mlp()
    blocks = [WideBlock(nn.BatchNorm1d(64), 64) for _ in range(8)]
    return nn.Sequential(nn.Linear(16, 64), *blocks, nn.Linear(64, 4)), x, y, batch


class CausalModel(nn.Module):
    """A GPT whose largest tensor is its logits."""

    VOCABULARY = 4096

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.embed, self.head = nn.Embedding(self.VOCABULARY, width), nn.Linear(width, self.VOCABULARY)
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.blocks(self.embed(x), mask=mask, is_causal=True)).flatten(0, 1)  # type: ignore[no-any-return]


def text() -> tuple[nn.Module, Tensor, Tensor, int]:
    rows = 32
    x = torch.randint(0, CausalModel.VOCABULARY, (2 * rows * STEPS, 64))
    return CausalModel(depth=10), x, x.roll(-1, 1), 2 * rows


WORKS = {"mlp": mlp, "batch norm": normalised, "text": text}


def bytes_of(name: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith(f"{name}:"))


def generate_kernels(kind: str, passes: int) -> None:
    """Let oneDNN generate the code that a step needs: where that fails for want of memory, it does for good."""
    net, x, y, batch = WORKS[kind]()
    rows = batch // passes
    F.cross_entropy(net(x[:rows]), y[:rows].flatten()).backward()
    del net, x, y
    free_caches(torch.device("cpu"))


def start_threads() -> None:
    """Let collectives start the threads that they need, whose stacks would take a part of the limit."""
    if px.init().rank == 0:
        time.sleep(0.2)
    gradients = group_of([(0, 1)], "gradients")
    for group in (None, gradients):
        dist.all_reduce(torch.ones(1 << 20), group=group, async_op=True).wait()


def train(kind: str, limit: int, word: str, replicas: int | None) -> tuple[str, int]:
    """Return the weights' digest and the address space that the steps took; rank 1 gets `limit` bytes, unless 0."""
    gc.freeze()
    # Each thread's own heap reserves 64 MB of addresses, or not, as the threads' allocations happen to meet.
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    block_return.tighten(torch.device("cpu"))  # else what the first pass frees is there for the second
    generate_kernels(kind, replicas or 2)
    torch.manual_seed(0)
    net, x, y, batch = WORKS[kind]()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    strategy = px.DistributedStrategy(out_of_memory=word)
    data = TensorDataset(x, y)
    _, _, loader = px.distribute(net, optimizer, data, global_batch=batch, strategy=strategy, replicas=replicas)
    start_threads()
    before = bytes_of("VmSize")
    if limit and px.init().rank == 1:
        resource.setrlimit(resource.RLIMIT_AS, (before + limit, resource.RLIM_INFINITY))
    for a, b in loader:
        optimizer.zero_grad()
        F.cross_entropy(net(a), b.flatten()).backward()
        optimizer.step()
    return digest(net), bytes_of("VmPeak") - before


def limited(kind: str, replicas: int | None = None, share: float = 0.5) -> tuple[str, int]:
    """Return the digest without a limit, and a share of what the steps took."""
    outcomes: list[Any] = run_ranks(train, 2, kind, 0, "recompute", replicas)
    assert outcomes[0][0] == outcomes[1][0]
    return outcomes[0][0], int(outcomes[1][1] * share)


@pytest.mark.parametrize(
    ("kind", "replicas", "share"),
    [("mlp", None, 0.5), ("batch norm", None, 0.5), ("mlp", 4, 0.5), ("text", None, 0.72), ("text", None, 0.57)],
)
def test_less_memory_gives_the_same_weights(kind: str, replicas: int | None, share: float) -> None:
    whole, limit = limited(kind, replicas, share)
    outcomes = run_ranks(train, 2, kind, limit, "recompute", replicas, expect_failure=True)
    assert not any(outcome.failed for outcome in outcomes), outcomes[1].output
    assert [outcome.value[0] for outcome in outcomes] == [whole, whole]
    assert "rank 1 ran out of memory" in outcomes[1].output
    assert "ran out of memory" not in outcomes[0].output


def test_with_the_word_off_the_same_limit_ends_the_run() -> None:
    _, limit = limited("mlp")
    outcomes = run_ranks(train, 2, "mlp", limit, "raise", None, expect_failure=True)
    assert "allocate memory" in outcomes[1].message
    assert outcomes[0].error_type == "PeerLostError"
