"""The cross entropy of logits that are cut over ranks equals that of whole logits, at any magnitude."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as px
from phalanx.errors import ConfigError
from ranks import run_ranks

pytestmark = pytest.mark.dist

CLASSES = 7
CASES = [
    {"scale": scale, "dtype": dtype, "reduction": reduction}
    for scale, dtype in ((1.0, torch.float64), (1e4, torch.float64), (1e4, torch.float32), (1.0, torch.bfloat16))
    for reduction in ("mean", "sum", "none")
]


def logits(scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(4, 3, CLASSES, generator=generator, dtype=torch.float64) * scale
    target = torch.randint(CLASSES, (4, 3), generator=generator)
    target[1, 1] = -100
    return drawn.to(dtype), target


def of_rank() -> tuple[list[tuple[Tensor, Tensor]], list[str], str]:
    rank = px.init().rank
    found = []
    for case in CASES:
        drawn, target = logits(case["scale"], case["dtype"])
        part = drawn.tensor_split(2, -1)[rank].clone().requires_grad_()
        loss = px.vocab_cross_entropy(part, target, reduction=case["reduction"])
        (loss * torch.linspace(1, 2, loss.numel()).view(loss.shape)).sum().backward()
        found.append((loss.detach(), px.comm.all_gather(part.grad, -1)))
    messages = [message(target) for target in (torch.full((4, 3), CLASSES), torch.zeros(4, dtype=torch.int64))]
    return found, messages, loss_of_a_part()


def loss_of_a_part() -> str:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, CLASSES)).double()
    px.distribute(px.shard(model, {"1": "vocab"}, axis="model", size=2))
    inputs, target = torch.ones(5, 3).double(), torch.tensor([0, 1, 2, -100, 0])
    px.vocab_cross_entropy(model(inputs), target, axis="model").backward()
    F.cross_entropy(px.comm.all_gather(model(inputs), -1, axis="model"), target).backward()
    with pytest.raises(ConfigError) as caught:
        F.cross_entropy(model(inputs), target).backward()
    return str(caught.value)


def message(target: Tensor) -> str:
    with pytest.raises(ConfigError) as caught:
        px.vocab_cross_entropy(torch.zeros(4, 3, 4 - px.current().rank), target)
    return str(caught.value)


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return run_ranks(of_rank, 2)


def test_losses_and_gradients_equal_those_of_whole_logits(ranks: list[Any]):
    for (found, *_), case in ((rank, case) for case in enumerate(CASES) for rank in ranks):
        index, settings = case
        whole, target = logits(settings["scale"], settings["dtype"])
        whole.requires_grad_()
        wide = whole.to(torch.promote_types(whole.dtype, torch.float32))
        loss = F.cross_entropy(wide.flatten(0, 1), target.flatten(), reduction=settings["reduction"])
        (loss * torch.linspace(1, 2, loss.numel()).view(loss.shape)).sum().backward()
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}[whole.dtype]
        value, gradient = found[index]
        assert torch.isfinite(value).all()
        torch.testing.assert_close(value.flatten(), loss.detach().flatten(), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(gradient, whole.grad, rtol=tolerance, atol=tolerance)


def test_targets_that_are_no_class_or_do_not_fit_are_an_error_on_all_ranks(ranks: list[Any]):
    for _, (outside, unfit), _ in ranks:
        assert "vocab_cross_entropy over 7 classes found targets from 7 to 7" in outside
        assert "needs targets (4, 3), found (4,). Classes are the last dim of logits" in unfit


def test_a_loss_that_takes_cut_logits_for_whole_is_an_error_on_all_ranks(ranks: list[Any]):
    for _, _, apart in ranks:
        assert "the loss took the logits of '1' for whole, but each rank along axis 'model' has some of" in apart
        assert 'Use px.vocab_cross_entropy(logits, target, axis="model"), or style "column" for \'1\'' in apart


def test_one_process_takes_whole_logits():
    whole, target = logits(1e4, torch.float64)
    loss = px.vocab_cross_entropy(whole, target)
    assert loss == F.cross_entropy(whole.flatten(0, 1), target.flatten())
    assert px.vocab_cross_entropy(whole, target, reduction="none").shape == target.shape
    with pytest.raises(ConfigError, match="knows reduction 'mean', 'sum' and 'none', found 'max'"):
        px.vocab_cross_entropy(whole, target, reduction="max")
