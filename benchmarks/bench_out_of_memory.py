"""What the memory guard costs where memory suffices, and how fast a model trains with half the memory that it takes.

    python -m benchmarks.bench_out_of_memory [--quick] [--json] [--cases "guard mlp"]

"guard" compares updates/s of `out_of_memory = "recompute"` with `"raise"`, in turn in one process. "half" limits the
address space of a process of its own (RLIMIT_AS) to half of what its steps take, and compares it with no limit.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as px
from benchmarks.report import Row, arguments, measure_pairs, show

CASES = ("guard mlp", "guard resnet", "guard gpt", "half mlp", "half gpt")


class Residual(nn.Module):
    """Two layers around which the input goes."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input plus what the layers make of it."""
        return x + self.layers(x)


class CausalModel(nn.Module):
    """A GPT of torch's layers."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits by class, then position."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.blocks(self.embed(x), mask=mask, is_causal=True)).transpose(1, 2)


def work(kind: str, rows: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a model with a batch."""
    torch.manual_seed(0)
    if kind == "mlp":
        blocks = [Residual(nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 256)) for _ in range(8)]
        return nn.Sequential(*blocks, nn.Linear(256, 10)), torch.randn(rows, 256), torch.randint(0, 10, (rows,))
    if kind == "resnet":
        convs = [(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(8)]
        net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *[Residual(*layers) for layers in convs], nn.Flatten())
        return nn.Sequential(net, nn.Linear(16 * 256, 10)), torch.randn(rows, 3, 16, 16), torch.randint(0, 10, (rows,))
    x = torch.randint(0, 256, (rows, 64))
    return CausalModel(128, 6), x, x.roll(-1, 1)


def updates_per_s(kind: str, rows: int, updates: int, word: str) -> float:
    """Train a new model; return updates a second, without the first ones."""
    torch.set_num_threads(1)
    net, x, y = work(kind, rows)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    px.distribute(net, optimizer, strategy=px.DistributedStrategy(out_of_memory=word))
    started = 0.0
    for index in range(updates + 2):
        if index == 2:
            started = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    return updates / (time.perf_counter() - started)


def limited_updates_per_s(kind: str, rows: int, updates: int, limit: int) -> tuple[float, int]:
    """Train in this process with so many bytes more, all if 0; return updates/s and the address space that it took."""
    before = _bytes_of("VmSize")
    if limit:
        resource.setrlimit(resource.RLIMIT_AS, (before + limit, resource.RLIM_INFINITY))
    return updates_per_s(kind, rows, updates, "recompute"), _bytes_of("VmPeak") - before


def _bytes_of(name: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith(f"{name}:"))


def apart(kind: str, rows: int, updates: int, limit: int) -> tuple[float, int]:
    """Call `limited_updates_per_s` in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(limited_updates_per_s, (kind, rows, updates, limit))


def measure(case: str, *, is_quick: bool) -> Row:
    """Return the row of a case."""
    how, kind = case.split()
    if how == "guard":
        rows, updates, pairs = (4, 2, 1) if is_quick else ({"mlp": 64, "resnet": 16, "gpt": 8}[kind], 40, 9)
        return measure_pairs(
            f"{case}, {rows} rows",
            lambda: updates_per_s(kind, rows, updates, "recompute"),
            lambda: updates_per_s(kind, rows, updates, "raise"),
            pairs=pairs,
            unit="updates/s",
            better="higher",
            peer_name='out_of_memory = "raise"',
        )
    rows, updates, pairs = (64, 1, 1) if is_quick else ({"mlp": 4096, "gpt": 128}[kind], 5, 3)
    taken = apart(kind, rows, updates, 0)[1]
    return measure_pairs(
        f"{case} the memory, {rows} rows, limit {taken // 2 // 2**20} MiB",
        lambda: apart(kind, rows, updates, 0 if is_quick else taken // 2)[0],
        lambda: apart(kind, rows, updates, 0)[0],
        pairs=pairs,
        unit="updates/s",
        better="higher",
        peer_name="no limit",
    )


def main() -> None:
    """Run the cases asked for."""
    asked = arguments(CASES)
    show("bench_out_of_memory", [measure(case, is_quick=asked.quick) for case in asked.cases], as_json=asked.json)


if __name__ == "__main__":
    main()
