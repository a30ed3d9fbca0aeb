"""`check_nan_inf` in loops with torch's GradScaler: what the scale made too large is no NaN, and a real one is."""

from __future__ import annotations

import logging
import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from phalanx.errors import NotFiniteError
from phalanx.parallel.numerics import origin_exchange
from phalanx.parallel.numerics.nan_check import check_nan_inf
from ranks import run_ranks

pytestmark = pytest.mark.dist

BAD_STEP = 3


class Net(nn.Module):
    """A model that makes NaN in one step on the last rank, if a fault says so."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.fault, self.step = fault, 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        is_struck = self.step >= BAD_STEP and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
        if is_struck and self.fault == "log":
            x = x + (x * 0.0 - 1.0).log()
        if is_struck and self.fault == "root":
            x = x + (x * 0.0).sqrt()
        return x


def loss_of(output: Tensor, fault: str, step: int) -> Tensor:
    loss = 1e3 * output.square().mean()
    if fault == "root in the loss" and step >= BAD_STEP:
        loss = loss + (output * 0.0).square().sum().sqrt()
    if fault == "log in the loss" and step >= BAD_STEP:
        loss = loss + (output.sum() * 0.0 - 1.0).log()
    return loss


def train(fault: str, fused: bool, first_scale: float, unscales: bool = False) -> tuple[str, list[float]]:
    """Return the error, and the scale after each step."""
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    check_nan_inf()
    torch.manual_seed(0)
    net = Net(fault)
    model = DistributedDataParallel(net) if dist.is_initialized() else net
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-5, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=first_scale, backoff_factor=0.25, growth_interval=10**6)
    scales: list[float] = []
    try:
        for net.step in range(20):
            optimizer.zero_grad()
            scaler.scale(loss_of(model(torch.ones(2, 4)), fault, net.step)).backward()
            if unscales:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
    except NotFiniteError as error:
        return str(error), scales
    return "", scales


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_that_the_scaler_leaves_out_for_its_scale_are_not_reported(
    ranks: int, unscales: bool, fused: bool
) -> None:
    for error, scales in run_ranks(train, ranks, "", fused, 3e38, unscales):
        assert error == ""
        assert scales[0] < 3e38, "the first step did not overflow, so that this tests nothing"
        assert scales[-1] == scales[-5], "no step was taken"


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("log", "in an output of the model (Net), computed by log at "),
        ("root", "in a gradient of the model (Net), computed by SqrtBackward0 "),
        ("log in the loss", "in the loss, computed by Add at "),
    ],
)
def test_a_real_nan_is_reported_at_its_step(fault: str, words: str, ranks: int, fused: bool) -> None:
    for error, scales in run_ranks(train, ranks, fault, fused, 1024.0):
        assert len(scales) == BAD_STEP
        on = f" on rank {1 if 'loss' not in fault else 0}" if ranks > 1 else ""
        what = "infinity" if fault == "root" else "NaN"
        assert error.startswith(f"step {BAD_STEP}: {what} first appeared{on} {words}"), error


@pytest.mark.parametrize("fused", [False, True])
def test_what_the_scale_may_have_caused_is_reported_once_there_is_none(fused: bool) -> None:
    ((error, scales),) = run_ranks(train, 1, "root in the loss", fused, 64.0)
    assert scales[BAD_STEP:] == [16.0, 4.0, 1.0]
    assert "in the gradient of the loss by the model's output" in error


def train_apart(fault: str) -> tuple[str, int, float, list[str]]:
    """Let each rank train a model of its own, of which only that of rank 1 overflows; return also what was logged."""
    dist.init_process_group("gloo")
    origin_exchange.LEFT_OUT_S = 0.5
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    origin_exchange.logger.addHandler(handler)
    check_nan_inf()
    net, left_out, started = Net(fault), 0, time.monotonic()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-5)
    scaler = torch.amp.GradScaler("cpu", init_scale=3e38 if dist.get_rank() else 1.0, backoff_factor=0.25)
    try:
        for net.step in range(20):
            optimizer.zero_grad()
            scale = scaler.get_scale()
            scaler.scale(loss_of(net(torch.ones(2, 4)), fault, net.step)).backward()
            scaler.step(optimizer)
            scaler.update()
            left_out += scaler.get_scale() < scale
    except NotFiniteError as error:
        return str(error), left_out, time.monotonic() - started, logged
    return "", left_out, time.monotonic() - started, logged


def test_ranks_that_leave_out_other_steps_are_waited_for_once_and_named() -> None:
    (_, none, _, quiet), (error, some, seconds, logged) = run_ranks(train_apart, 2, "")
    assert (none, quiet, error) == (0, [], "")
    assert some > 2
    assert 0.5 < seconds < 0.5 * some, "a wait for each step that was left out takes so long"
    assert ["within 0.5 s not on rank 0 " in line for line in logged] == [True]


def test_a_real_nan_of_a_rank_that_trains_alone_is_reported_on_it() -> None:
    _, (error, *_) = run_ranks(train_apart, 2, "log")
    assert error.startswith(f"step {BAD_STEP}: NaN first appeared on rank 1 in an output of the model (Net)"), error


def train_in_float16() -> str:
    check_nan_inf()
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    nn.init.constant_(net[0].weight, 1e3)
    nn.init.constant_(net[2].weight, 1e3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    try:
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                output = net(torch.ones(2, 4))
            scaler.scale(output.float().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    except NotFiniteError as error:
        return str(error)
    return ""


def test_a_forward_pass_too_large_for_float16_is_named_as_it_was_computed() -> None:
    (error,) = run_ranks(train_in_float16, 1)
    assert "step 0: infinity first appeared in an output of module 2 (Linear), computed by" in error, error
