"""Clipping in one process is torch's own, to rounding."""

import math

import pytest
import torch
from torch import nn

from phalanx.errors import ConfigError
from phalanx.parallel.optim.clip import clip_grad_norm_, clip_steps
from phalanx.parallel.step.norms import whole_norms


def net_with_gradients() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3), nn.Linear(3, 2))
    net(torch.randn(7, 6)).square().sum().backward()
    net[2].bias.grad = None
    return net


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_one_process_clips_as_torch_does(order: float, limit: float) -> None:
    ours, torchs = net_with_gradients(), net_with_gradients()
    norm = clip_grad_norm_(ours, limit, order)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(torchs.parameters(), limit, order))
    for mine, theirs in zip(ours.parameters(), torchs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_model_without_gradients_has_norm_zero() -> None:
    assert clip_grad_norm_(nn.Linear(2, 2), 1.0) == 0.0


def test_a_limit_that_is_not_above_zero_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"above 0, found max_norm=0"):
        clip_grad_norm_(nn.Linear(2, 2), 0)
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    with pytest.raises(ConfigError, match=r"finite max_value above 0, found inf"):
        clip_steps(optimizer, max_value=math.inf)


def test_a_norm_that_is_not_finite_is_an_error_where_asked() -> None:
    net = net_with_gradients()
    net[0].weight.grad[0, 0] = math.nan
    with pytest.raises(ConfigError, match="the norm of the gradients is nan"):
        clip_grad_norm_(net, 1.0, error_if_nonfinite=True)
    assert math.isnan(clip_grad_norm_(net, 1.0))


def test_norms_of_half_precision_are_taken_in_single() -> None:
    norms = whole_norms([torch.full((64,), 3e4, dtype=torch.float16), torch.zeros(0), torch.ones(4)], [()] * 3)
    torch.testing.assert_close(norms, torch.tensor([2.4e5, 0.0, 2.0]), rtol=1e-3, atol=0)


def test_an_optimizer_clips_values_then_the_norm_before_each_update() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    clip_steps(optimizer, max_norm=2.5, max_value=3.0)
    weight.grad = torch.tensor([30.0, -4.0])
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([-1.0, 1.0]) * 2.5 / math.sqrt(2))


@pytest.mark.parametrize("named", [False, True])
def test_a_closure_whose_gradients_nothing_would_clip_is_refused(named: bool) -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    clip_steps(optimizer, max_norm=2.5)
    with pytest.raises(ConfigError, match="acts on the gradients before the update, where a closure has not computed"):
        optimizer.step(closure=lambda: 0.0) if named else optimizer.step(lambda: 0.0)
    optimizer.step(None)
