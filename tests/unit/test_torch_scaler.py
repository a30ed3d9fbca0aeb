"""Steps that torch's GradScaler takes: settings act on true gradients, also where a fused kernel would unscale them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import phalanx as px
from phalanx.errors import ConfigError

INPUTS = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))


def train(
    optimizer: torch.optim.Optimizer, model: nn.Module, scaler: torch.amp.GradScaler, factor: float = 1.0
) -> None:
    optimizer.zero_grad()
    scaler.scale(model(INPUTS).square().mean() * factor).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize(
    "settings",
    [{"clip": True, "clip_configs": {"norm": 1e-3}}, {"lamb": True}, {"ema": True}],
    ids=["clip", "lamb", "ema"],
)
@pytest.mark.parametrize("unscales_first", [False, True])
def test_a_fused_optimizer_under_a_scaler_trains_as_one_that_is_not(
    settings: dict[str, Any], unscales_first: bool
) -> None:
    results = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01, fused=fused)
        px.distribute(model, optimizer, strategy=px.DistributedStrategy(**settings))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for factor in (1.0, float("inf"), 1.0):
            if unscales_first:
                optimizer.zero_grad()
                scaler.scale(model(INPUTS).square().mean() * factor).backward()
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            else:
                train(optimizer, model, scaler, factor)
        updates = px.ema_of(model).updates if "ema" in settings else 2
        assert updates == 2, "the step that overflowed is none"
        assert scaler.get_scale() == 512.0
        results.append([param.detach().clone() for param in model.parameters()])
    for plain, fused_too in zip(*results, strict=True):
        assert plain.isfinite().all()
        torch.testing.assert_close(plain, fused_too, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscales_first", [False, True])
def test_merged_gradients_and_a_scaler_are_refused_before_the_first_update(fused: bool, unscales_first: bool) -> None:
    model = nn.Linear(5, 3)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    strategy = px.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 2})
    px.distribute(model, optimizer, strategy=strategy)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(INPUTS).mean()).backward()
    if unscales_first:
        scaler.unscale_(optimizer)
    with pytest.raises(ConfigError, match="GradScaler steps this SGD, and gradient_merge adds up gradients"):
        scaler.step(optimizer)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_scaler_that_is_off_changes_nothing_for_merged_gradients() -> None:
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = px.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 1})
    px.distribute(model, optimizer, strategy=strategy)
    before = model.weight.detach().clone()
    train(optimizer, model, torch.amp.GradScaler("cpu", enabled=False))
    assert not torch.equal(before, model.weight)
