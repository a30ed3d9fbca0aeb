"""One benchmark on one device: `python -m benchmarks.gpu.cases CASE [--quick]` prints `FIGURE` and a JSON object.

Each case compares a way to run a step with the plain one, in one process; `sparse` runs under `phalanx run`
with a server. They take the device that `px.init()` picks: also the CPU, where figures mean nothing and errors show.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import phalanx as px
from phalanx import accelerator


def _net(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)) for _ in range(layers)]
    return nn.Sequential(*blocks, nn.Linear(width, 10))


def _wait(device: torch.device) -> None:
    if accelerator.is_accelerator(device):
        accelerator.synchronize(device)


def _samples_per_s(step: Callable[[Tensor, Tensor], Any], rows: int, width: int, steps: int) -> float:
    device = px.init().device
    x, y = torch.randn(rows, width, device=device), torch.randint(10, (rows,), device=device)
    for _ in range(5):  # compilers, captures and allocators begin here
        step(x, y)
    _wait(device)
    began = time.perf_counter()
    for _ in range(steps):
        step(x, y)
    _wait(device)
    return rows * steps / (time.perf_counter() - began)


def _step(width: int, layers: int, *, compiled: bool = False, dtype: str | None = None) -> px.train.step.step.TrainStep:
    strategy = px.DistributedStrategy()
    if dtype is not None:
        strategy.amp = True
        strategy.amp_configs = {"dtype": dtype}
    model = _net(width, layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer, _ = px.distribute(model, optimizer, strategy=strategy)
    return px.train_step(model, nn.functional.cross_entropy, optimizer, compiled=compiled)


def _compare(ways: dict[str, Callable[[], Any]], quick: bool, width: int, rows: int) -> dict[str, float]:
    """Return the median samples/s of each way, one after the other: models of one process have one strategy."""
    steps, rounds = (3, 1) if quick else (100, 5)
    figures = {}
    for name, make in ways.items():
        step = make()
        rates = [_samples_per_s(step, rows, width, steps) for _ in range(rounds)]
        figures[f"{name}, samples/s"] = statistics.median(rates)
        del step
        gc.collect()
    return figures


def compiled(quick: bool) -> dict[str, float]:
    """The compiled step against the eager one."""
    width, layers = (16, 2) if quick else (1024, 8)
    ways = {"eager": partial(_step, width, layers), "compiled": partial(_step, width, layers, compiled=True)}
    return _compare(ways, quick, width, 256)


def amp(quick: bool) -> dict[str, float]:
    """Mixed precision against float32."""
    width, layers = (16, 2) if quick else (2048, 8)
    ways = {"float32": partial(_step, width, layers)}
    ways |= {dtype: partial(_step, width, layers, dtype=dtype) for dtype in ("bfloat16", "float16")}
    return _compare(ways, quick, width, 8 if quick else 1024)


def sink(quick: bool) -> dict[str, float]:
    """`px.Model.train` with `dataset_sink_mode` against without: small steps, where launches are what counts."""
    rows, epochs = (64, 1) if quick else (64 * 200, 2)
    figures = {}
    for mode in (False, True):
        net = _net(64, 6)
        model = px.Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), 1e-3))
        data = (torch.randn(rows, 64), torch.randint(10, (rows,)))
        model.train(1, data, dataset_sink_mode=mode, batch_size=64)
        _wait(px.init().device)
        began = time.perf_counter()
        model.train(epochs, data, dataset_sink_mode=mode, batch_size=64)
        _wait(px.init().device)
        name = "sink" if mode else "step by step"
        figures[f"{name}, samples/s"] = rows * epochs / (time.perf_counter() - began)
    return figures


def sparse(quick: bool) -> dict[str, float]:
    """A table on a server of the CPU, looked up by a worker on the device."""
    embedding: Any = px.ps.SparseEmbedding(16, name="item")
    torch.manual_seed(0)
    model: Any = nn.Sequential(embedding, nn.Flatten(), nn.Linear(16 * 8, 1))
    optimizer: Any = torch.optim.Adagrad(model.parameters(), lr=0.01)
    model, optimizer, _ = px.distribute(model, optimizer)
    steps, rows = (3, 16) if quick else (100, 1024)
    device = px.init().device
    ids = torch.randint(100_000, (steps, rows, 8), device=device)
    target = torch.rand(rows, device=device)

    def step(index: int) -> None:
        loss = nn.functional.binary_cross_entropy_with_logits(model(ids[index]).squeeze(1), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    step(0)
    began = time.perf_counter()
    for index in range(steps):
        step(index)
    _wait(device)
    return {"examples/s": rows * steps / (time.perf_counter() - began)}


def collectives(quick: bool) -> dict[str, float]:
    """A process group of one rank over NCCL: that it starts, adds up, and what a call costs."""
    device = px.init().device
    backend = accelerator.device_backend(device.type) or "gloo"
    store: Any = dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        values = torch.ones(1 << (10 if quick else 26), device=device)
        for _ in range(3):
            dist.all_reduce(values)
        _wait(device)
        began, calls = time.perf_counter(), 20
        for _ in range(calls):
            dist.all_reduce(values)
        _wait(device)
        seconds = (time.perf_counter() - began) / calls
        assert bool((values == 1).all())
    finally:
        dist.destroy_process_group()
    return {"all_reduce of one rank, us": 1e6 * seconds}


CASES = {case.__name__: case for case in (compiled, sink, amp, sparse, collectives)}


def main() -> None:
    """Run one case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=sorted(CASES))
    parser.add_argument("--quick", action="store_true", help="toy size, only to see that it works")
    asked = parser.parse_args()
    figures = CASES[asked.case](asked.quick)
    print("FIGURE", json.dumps({"device": str(px.init().device), "figures": figures}), flush=True)


if __name__ == "__main__":
    main()
