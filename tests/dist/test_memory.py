"""What `explain` says of memory is what is there: parameters, gradients and optimizer state, to the byte."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import phalanx as px
from benchmarks.tracked import bytes_of, held, saved_bytes
from phalanx.errors import ConfigError
from ranks import run_ranks

pytestmark = pytest.mark.dist

Case = tuple[dict[str, Any], str]

CASES: dict[str, Case] = {
    "data parallel": ({}, "sgd"),
    "plain sgd": ({}, "plain"),
    "adam": ({"clip": True, "clip_configs": {"norm": 1.0}}, "adam"),
    "stage 1": ({"sharding": True}, "adam"),
    "stage 2": ({"sharding": True, "sharding_configs": {"stage": 2}, "fp16_allreduce": True}, "sgd"),
    "stage 3": ({"sharding": True, "sharding_configs": {"stage": 3}}, "adam"),
    "pure": ({"amp": True, "amp_configs": {"use_pure_bf16": True}}, "adam"),
    "dgc": ({"dgc": True}, "sgd"),
    "dgc later": ({"dgc": True, "dgc_configs": {"rampup_begin_step": 1}}, "sgd"),
    "localsgd": ({"localsgd": True}, "sgd"),
    "ema": ({"ema": True}, "sgd"),
    "cut": ({"tensor_parallel": True, "tensor_parallel_configs": {"tensor_parallel_degree": 2}}, "adam"),
}

OPTIMIZERS = {
    "plain": lambda params: torch.optim.SGD(params, lr=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.AdamW(params, lr=0.1),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    frozen = nn.Linear(7, 9).requires_grad_(False)
    return nn.Sequential(frozen, nn.Linear(9, 131), nn.Tanh(), nn.Linear(131, 129), nn.Tanh(), nn.Linear(129, 3))


def train(case: Case) -> tuple[dict[str, int], dict[str, int]]:
    """Return the memory that is told and the memory that is there."""
    settings, kind = case
    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    if "tensor_parallel" in settings:
        px.shard(model, {"1": "column", "3": "row"})
    strategy = px.DistributedStrategy(**settings)
    model, optimizer, _ = px.distribute(model, optimizer, strategy=strategy)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 7)).square().mean().backward()
        optimizer.step()
    explained = px.explain(model, optimizer=optimizer)
    told = explained.memory
    assert f"{told.parameters:,}" in str(explained)
    averages = bytes_of(px.ema_of(model).state_dict()["shadow"].values()) if strategy.ema else 0
    names = ("parameters", "gradients", "optimizer", "residuals", "averages")
    return {name: getattr(told, name) for name in names}, held(model, optimizer) | {"averages": averages}


def train_all() -> dict[str, tuple[dict[str, int], dict[str, int]]]:
    px.init()
    found = {}
    for name, case in CASES.items():
        found[name] = train(case)
        gc.collect()  # the next case has another strategy
    return found


def test_explain_tells_the_memory_that_is_there() -> None:
    ranks = run_ranks(train_all, 2)
    for rank, found in enumerate(ranks):
        for name, (told, there) in found.items():
            assert told == there, f"{name}, rank {rank}"
    whole = ranks[0]["adam"][0]
    for stage in ("stage 1", "stage 3"):
        told = ranks[0][stage][0]
        for kind in ("parameters", "gradients", "optimizer"):
            assert told[kind] == pytest.approx(whole[kind] / 2, rel=0.02), (stage, kind)


UNIT = 32 * (64 + 16) * 4
"""Bytes of what one unit keeps: the outputs of two hyperbolic tangents for 32 rows."""
INPUT = 32 * 16 * 4
RECOMPUTED: list[tuple[dict[str, Any] | None, int]] = [
    (None, 3 * UNIT),
    ({}, 2 * INPUT),  # the first unit's input is the model's
    ({"checkpoints": ["0", "1"]}, INPUT + INPUT + UNIT),
    ({"selective": True}, 2 * INPUT + 3 * UNIT),  # what matrix products gave
]


def measured(recompute: dict[str, Any] | None) -> tuple[int, int]:
    """Return the activations that are told, and what autograd saves."""
    strategy = px.DistributedStrategy()
    if recompute is not None:
        strategy.recompute, strategy.recompute_configs = True, recompute
    layers = [nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16), nn.Tanh()) for _ in range(3)]
    model, _, _ = px.distribute(nn.Sequential(*layers), strategy=strategy)
    inputs = torch.randn(32, 16)
    return px.explain(model, inputs).activation_bytes, saved_bytes(model, inputs)


def measured_all() -> list[tuple[int, int]]:
    px.init()
    found = []
    for case, _ in RECOMPUTED:
        found.append(measured(case))
        gc.collect()
    return found


def test_recompute_keeps_what_explain_says() -> None:
    (found,) = run_ranks(measured_all, 1)
    for (case, expected), (told, saved) in zip(RECOMPUTED, found, strict=True):
        assert told == expected, case
        # Selective recomputation keeps results in a place of its own.
        assert saved == (2 * INPUT if case == {"selective": True} else expected), case


def test_a_memory_that_is_not_known_is_refused() -> None:
    model = nn.Linear(2, 2)
    px.distribute(model)
    with pytest.raises(ConfigError, match=r"explain knows what SGD, Adam, .* keep, found Rprop. Leave optimizer out"):
        px.explain(model, optimizer=torch.optim.Rprop(model.parameters()))
