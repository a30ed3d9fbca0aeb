"""Loss scaling: parameters get true gradients, steps that overflow are skipped, the scale follows its rule."""

import gc
import itertools
import math

import pytest
import torch
from torch import nn

import phalanx as px
from phalanx.errors import ConfigError
from phalanx.parallel.optim.clip import clip_grad_norm_, clip_steps
from phalanx.parallel.precision.autocast import apply_precision
from phalanx.parallel.precision.loss_scale import LossScale, gradient_scale
from phalanx.parallel.precision.master_weights import keep_master_weights
from phalanx.parallel.step.gate import follow_updates, has_updated
from phalanx.plan.value import Scaler


def made(**settings: object) -> tuple[nn.Linear, torch.optim.SGD, LossScale]:
    px.init()
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scale = LossScale(Scaler(**settings))
    scale.bind(optimizer)
    return model, optimizer, scale


@pytest.mark.parametrize("overflows", list(itertools.product([False, True], repeat=9))[::31])
def test_the_scale_moves_as_torchs_does(overflows: tuple[bool, ...]) -> None:
    torchs = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=3)
    ours = LossScale(Scaler(initial=1024.0, growth_every=3, growth=2.0, backoff=0.5, backoff_after=1))
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for overflowed in overflows:
        torchs.scale(weight.sum()).backward()
        weight.grad.fill_(math.inf if overflowed else 1.0)
        torchs.step(optimizer)
        torchs.update()
        ours.update(overflowed=overflowed)
        assert ours.value == torchs.get_scale()


def test_the_scale_falls_after_several_overflows_and_never_below_one() -> None:
    scale = LossScale(Scaler(initial=2.0, backoff=0.8, backoff_after=2))
    seen = []
    for overflowed in (True, False, True, True, True, True, True, True, True, True):
        scale.update(overflowed=overflowed)
        seen.append(scale.value)
    assert seen == pytest.approx([2, 2, 2, 1.6, 1.6, 1.28, 1.28, 1.024, 1.024, 1])
    resumed = LossScale(Scaler())
    resumed.load_state_dict(scale.state_dict())
    assert resumed.state_dict() == scale.state_dict()


def test_a_constant_scale_stays() -> None:
    scale = LossScale(Scaler(initial=8.0, dynamic=False, growth_every=1))
    scale.update(overflowed=False)
    scale.update(overflowed=True)
    assert scale.value == 8.0


def test_parameters_get_true_gradients_also_of_terms_outside_the_model() -> None:
    model, optimizer, _ = made()
    plain = nn.Linear(4, 2)
    plain.load_state_dict(model.state_dict())
    x = torch.randn(5, 4)
    for net, scaled in ((model, optimizer.scale), (plain, lambda loss: loss)):
        for _ in range(2):
            scaled(net(x).square().mean() + 0.1 * net.weight.norm()).backward()
    torch.testing.assert_close(model.weight.grad, plain.weight.grad)


def test_an_overflow_skips_the_step_and_is_counted_and_shown(caplog, phalanx_propagates) -> None:
    model, optimizer, scale = made(initial=8.0, backoff=0.5, backoff_after=1)
    before = model.weight.detach().clone()
    optimizer.scale(model(torch.full((1, 4), 1e30)).square().sum()).backward()
    optimizer.step()
    assert torch.equal(model.weight, before)
    assert (scale.skipped, scale.value, has_updated(optimizer)) == (1, 4.0, False)
    assert "step skipped (1 so far)" in caplog.text
    optimizer.zero_grad()
    optimizer.scale(model(torch.ones(1, 4)).square().sum()).backward()
    optimizer.step()
    assert not torch.equal(model.weight, before)


def test_a_loss_that_was_not_scaled_is_an_error() -> None:
    model, optimizer, _ = made()
    optimizer.scale(model(torch.ones(1, 4)).sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(ConfigError, match=r"optimizer\.scale\(loss\)\.backward\(\), or use phalanx\.train_step"):
        optimizer.step()


def test_a_parameter_that_came_late_is_an_error() -> None:
    model, optimizer, _ = made()
    late = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [late]})
    optimizer.scale(model(torch.ones(1, 4)).sum() + late.sum()).backward()
    with pytest.raises(ConfigError, match=r"shape \(3,\) was frozen, or not in the optimizer"):
        optimizer.step()


def test_a_closure_is_an_error_where_a_step_may_be_held_back() -> None:
    _, optimizer, _ = made()
    with pytest.raises(ConfigError, match="which a closure cannot know"):
        optimizer.step(lambda: 0.0)


@pytest.mark.parametrize("first", ["scheduler", "scale"])
def test_a_scheduler_may_count_updates(first: str) -> None:
    px.init()
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if first == "scale":
        LossScale(Scaler()).bind(optimizer)
    scheduler = follow_updates(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    if first == "scheduler":
        LossScale(Scaler()).bind(optimizer)
    for value in (1.0, 1e30, 1.0):
        optimizer.zero_grad()
        optimizer.scale(model(torch.full((1, 4), value)).square().sum()).backward()
        optimizer.step()
        scheduler.step()
    assert scheduler.get_last_lr() == [0.25]


@pytest.mark.parametrize("clips", ["call", "step"])
def test_pure_float16_keeps_small_gradients_and_clips_by_the_true_norm(clips: str) -> None:
    model, reference = (nn.Linear(4, 2, bias=False) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    apply_precision(model, "float16", pure=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e6)
    px.init()
    keep_master_weights(optimizer)
    LossScale(Scaler(initial=2.0**20, growth_every=1)).bind(optimizer)
    if clips == "step":
        clip_steps(optimizer, max_norm=1e-8)
    x = torch.ones(1, 4)
    optimizer.scale(model(x).sum() * 1e-8).backward()  # below the least float16
    assert model.weight.grad.min() > 1e-3
    assert gradient_scale(model.weight) == 2.0**20
    (reference(x).sum() * 1e-8).backward()
    expected = clip_grad_norm_(reference, 1e-8)
    if clips == "call":
        torch.testing.assert_close(clip_grad_norm_(model, 1e-8), expected, rtol=2e-2, atol=0)
    before = model.weight.detach().float()
    optimizer.step()
    moved = before - optimizer.state_dict()["state"][0]["master_weight"]
    assert moved.norm().item() == pytest.approx(1e6 * reference.weight.grad.norm().item(), rel=0.02)


def test_float16_parameters_without_copies_are_updated_by_true_gradients() -> None:
    px.init()
    model = nn.Linear(4, 2, bias=False).half()
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    LossScale(Scaler(initial=1024.0, growth_every=1)).bind(optimizer)
    optimizer.scale(model(torch.ones(1, 4).half()).float().sum()).backward()
    optimizer.step()
    torch.testing.assert_close(model.weight, before - 1)


def test_a_train_step_scales_its_loss() -> None:
    model, optimizer, scale = made(growth_every=1, initial=4.0)
    out = px.train_step(model, nn.functional.mse_loss, optimizer)(torch.ones(3, 4), torch.zeros(3, 2))
    assert (scale.skipped, scale.value) == (0, 8.0)
    torch.testing.assert_close(out.loss, nn.functional.mse_loss(made()[0](torch.ones(3, 4)), torch.zeros(3, 2)))


def test_parameters_have_one_loss_scale_which_ends_with_its_optimizer() -> None:
    model, optimizer, _ = made()
    with pytest.raises(ConfigError, match="unscaled already, for another optimizer"):
        LossScale(Scaler()).bind(torch.optim.SGD(model.parameters(), lr=0.1))
    del optimizer
    gc.collect()
    model(torch.ones(1, 4)).sum().backward()
    torch.testing.assert_close(model.bias.grad, torch.ones(2))
    LossScale(Scaler()).bind(torch.optim.SGD(model.parameters(), lr=0.1))
