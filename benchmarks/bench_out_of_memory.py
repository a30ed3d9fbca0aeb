"""What the memory guard costs where memory suffices, and how fast a model trains with half the memory that it takes.

    python -m benchmarks.bench_out_of_memory [--quick] [--json] [--cases "guard mlp"]

"guard" compares updates for a second of processor time of `out_of_memory = "recompute"` and `"raise"`: two processes
train by turns, a few updates each, so that a slow moment of the machine hits both; they are started anew several times,
for where a process lies in memory shifts its speed. "limited" does the same with a limit that is far away: without one,
the passes of a host are not guarded. "half" limits the address space of a process (RLIMIT_AS) to half of what its steps
take beside what was there before, or to the next eighth with which the run ends, and compares it with no limit.
"""

from __future__ import annotations

import logging
import multiprocessing
import resource
import time
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as px
from benchmarks.report import Row, arguments, measure_pairs, show

SPAWN = multiprocessing.get_context("spawn")
CASES = (
    "guard mlp",
    "guard resnet",
    "guard gpt",
    "limited mlp",
    "limited resnet",
    "limited gpt",
    "half mlp",
    "half gpt",
)
WORDS = ("recompute", "raise")
FAR = 1 << 46
"""Bytes of a limit that is never reached."""


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


class Trainer:
    """Trains a new model in this process."""

    def __init__(self, kind: str, rows: int, word: str) -> None:
        torch.set_num_threads(1)
        logging.disable(logging.WARNING)  # a line for each model
        self.net, self.x, self.y = work(kind, rows)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        px.distribute(self.net, self.optimizer, strategy=px.DistributedStrategy(out_of_memory=word))
        self.update(2)  # starts what a first step starts

    def update(self, rows: int) -> None:
        """Train on the first rows of the batch."""
        self.optimizer.zero_grad()
        F.cross_entropy(self.net(self.x[:rows]), self.y[:rows]).backward()
        self.optimizer.step()

    def updates_per_s(self, updates: int, clock: Callable[[], float] = time.perf_counter) -> float:
        """Train so many times on the whole batch."""
        started = clock()
        for _ in range(updates):
            self.update(len(self.x))
        return updates / (clock() - started)


def train_by_turns(kind: str, rows: int, word: str, turns: Connection, is_limited: bool) -> None:
    """Train so many updates as each message says, and answer how many a second."""
    if is_limited:
        resource.setrlimit(resource.RLIMIT_AS, (FAR, resource.RLIM_INFINITY))
    trainer = Trainer(kind, rows, word)
    trainer.updates_per_s(2)
    turns.send(0.0)
    while (updates := turns.recv()) > 0:
        turns.send(trainer.updates_per_s(updates, time.process_time))


class TrainerProcess:
    """A process that trains by turns."""

    def __init__(self, kind: str, rows: int, word: str, is_limited: bool) -> None:
        self._turns, other = SPAWN.Pipe()
        self._process = SPAWN.Process(target=train_by_turns, args=(kind, rows, word, other, is_limited), daemon=True)
        self._process.start()
        self._turns.recv()

    def updates_per_s(self, updates: int) -> float:
        """Let it train so many updates."""
        self._turns.send(updates)
        return float(self._turns.recv())

    def close(self) -> None:
        """End it."""
        self._turns.send(0)
        self._process.join()


class Turns:
    """A process for each word; all are started anew after so many turns of each."""

    def __init__(self, kind: str, rows: int, updates: int, most: int, *, is_limited: bool) -> None:
        self._work, self._updates, self._most, self._is_limited = (kind, rows), updates, most, is_limited
        self._processes: dict[str, TrainerProcess] = {}
        self._turns = 0

    def updates_per_s(self, word: str) -> float:
        """Let the process with a word train."""
        if self._turns == 2 * self._most:
            self.close()
        if not self._processes:
            self._processes = {each: TrainerProcess(*self._work, each, self._is_limited) for each in WORDS}
        self._turns += 1
        return self._processes[word].updates_per_s(self._updates)

    def close(self) -> None:
        """End the processes."""
        while self._processes:
            self._processes.popitem()[1].close()
        self._turns = 0


def limited_updates_per_s(kind: str, rows: int, updates: int, limit: int) -> tuple[float, int]:
    """Train in this process with so many bytes more, all if 0; return updates/s and the address space that it took.

    0 updates/s say that memory did not suffice.
    """
    if limit:  # as of a process that begins with a limit
        resource.setrlimit(resource.RLIMIT_AS, (FAR, resource.RLIM_INFINITY))
    trainer, before = Trainer(kind, rows, "recompute"), _bytes_of("VmSize")
    if limit:
        resource.setrlimit(resource.RLIMIT_AS, (before + limit, resource.RLIM_INFINITY))
    try:
        trainer.updates_per_s(2)
        return trainer.updates_per_s(updates), _bytes_of("VmPeak") - before
    except (RuntimeError, MemoryError):
        return 0.0, 0


def _bytes_of(name: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith(f"{name}:"))


def apart(kind: str, rows: int, updates: int, limit: int) -> tuple[float, int]:
    """Call `limited_updates_per_s` in a process of its own."""
    with SPAWN.Pool(1) as pool:
        return pool.apply(limited_updates_per_s, (kind, rows, updates, limit))


def least_limit(kind: str, rows: int, taken: int) -> int:
    """Return the first of 4/8, 5/8 ... of the memory taken with which a run ends."""
    limits = [taken * eighths // 8 for eighths in range(4, 8)]
    return next((limit for limit in limits if apart(kind, rows, 1, limit)[0]), 0)


def measure_guard(case: str, kind: str, *, is_quick: bool) -> Row:
    """Return the row of what the guard costs."""
    rows, updates = (4, 2) if is_quick else {"mlp": (64, 20), "resnet": (16, 10), "gpt": (8, 3)}[kind]
    is_limited = case.startswith("limited")
    with closing(Turns(kind, rows, updates, most=2 if is_quick else 15, is_limited=is_limited)) as turns:
        return measure_pairs(
            f"{case}, {rows} rows",
            lambda: turns.updates_per_s("recompute"),
            lambda: turns.updates_per_s("raise"),
            pairs=2 if is_quick else 90,
            unit="updates/s of processor time",
            better="higher",
            peer_name='out_of_memory = "raise"',
        )


def measure_half(case: str, kind: str, *, is_quick: bool) -> Row:
    """Return the row of the speed with half the memory."""
    rows, updates, pairs = (64, 1, 1) if is_quick else ({"mlp": 4096, "gpt": 48}[kind], 3, 3)
    taken = apart(kind, rows, updates, 0)[1]
    limit = 0 if is_quick else least_limit(kind, rows, taken)
    return measure_pairs(
        f"{case} the memory, {rows} rows, limit {limit // 2**20} of {taken // 2**20} MiB",
        lambda: apart(kind, rows, updates, limit)[0],
        lambda: apart(kind, rows, updates, 0)[0],
        pairs=pairs,
        unit="updates/s",
        better="higher",
        peer_name="no limit",
    )


def measure(case: str, *, is_quick: bool) -> Row:
    """Return the row of a case."""
    how, kind = case.split()
    return (measure_half if how == "half" else measure_guard)(case, kind, is_quick=is_quick)


def main() -> None:
    """Run the cases asked for."""
    asked = arguments(CASES)
    show("bench_out_of_memory", [measure(case, is_quick=asked.quick) for case in asked.cases], as_json=asked.json)


if __name__ == "__main__":
    main()
