"""One rank of `bench_memory`: train a few steps of every case, and compare what `explain` says with what is there."""

import gc
import json
import sys
from typing import Any

import torch
from torch import nn

import phalanx as px
from benchmarks.tracked import held, saved_bytes

CASES: dict[str, dict[str, Any]] = {
    "data parallel": {},
    "sharding 1": {"sharding": True, "sharding_configs": {"stage": 1}},
    "sharding 2": {"sharding": True, "sharding_configs": {"stage": 2}},
    "sharding 3": {"sharding": True, "sharding_configs": {"stage": 3}},
    "pure bfloat16": {"amp": True, "amp_configs": {"use_pure_bf16": True}},
    "recompute": {"recompute": True},
}


def net(width: int) -> nn.Module:
    """Return six units of two layers each."""
    torch.manual_seed(0)
    units = (nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(6))
    return nn.Sequential(*units)


def measure(settings: dict[str, Any], width: int) -> dict[str, dict[str, int]]:
    """Return bytes by kind: what is told, and what is there after three steps."""
    model = net(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, _ = px.distribute(model, optimizer, strategy=px.DistributedStrategy(**settings))
    inputs = torch.randn(256, width)
    for _ in range(3):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    there = held(model, optimizer)
    # Its forward pass in evaluation leaves the parameters of stages 1 and 2 gathered until the next backward pass.
    explained = px.explain(model, inputs, optimizer=optimizer)
    told = {kind: getattr(explained.memory, kind) for kind in there}
    if explained.activation_bytes is not None:
        told["activations"], there["activations"] = explained.activation_bytes, saved_bytes(model, inputs)
    return {kind: {"told": told[kind], "there": there[kind]} for kind in told if told[kind] or there[kind]}


def main() -> None:
    """Print the figures of rank 0."""
    px.init()
    names, width = sys.argv[1].split(","), int(sys.argv[2])
    found = {}
    for name in names:
        found[name] = measure(CASES[name], width)
        gc.collect()  # the next case has another strategy
    if px.current().rank == 0:
        print("FIGURE " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
