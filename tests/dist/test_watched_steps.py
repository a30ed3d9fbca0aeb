"""What watches a script's steps continues after calls that raised, steps left out, and epochs that were left."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import phalanx as px
from phalanx.comm.batch.backward_end import repeated_pass
from phalanx.parallel.numerics import nan_check
from phalanx.parallel.numerics.nan_check import NanCheck
from phalanx.parallel.observe.flight_log import FlightLog
from phalanx.parallel.observe.losses import watch_losses
from phalanx.parallel.observe.recorder import RecordRequest, StepRecorder
from phalanx.parallel.observe.sample_ids import sample_ids
from phalanx.parallel.precision.loss_scale import LossScale
from phalanx.plan.value import Scaler
from ranks import run_ranks

pytestmark = pytest.mark.dist


class Fails(nn.Module):
    """Raises once inside of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.is_due = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_due:
            self.is_due = False
            raise ValueError("once")
        output: Tensor = self.inner(x)
        return output


def train_with_a_failed_call() -> None:
    part = Fails()
    net = nn.Sequential(part, nn.ReLU())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for fails in (False, True, False):
        if fails:
            part.is_due = True
            with pytest.raises(ValueError, match="once"):
                net(torch.ones(4, 3))
        net(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def record(folder: str) -> list[tuple[list[int], int]]:
    StepRecorder(RecordRequest(folder, 99), 0).install()
    train_with_a_failed_call()
    steps = []
    for path in sorted(Path(folder).glob("*.npz")):
        with np.load(path) as file:
            steps.append((len(file["digests"]), len(file["outputs"])))
    return steps


def test_a_call_that_raised_does_not_end_the_recording(tmp_path: Path) -> None:
    (steps,) = run_ranks(record, 1, str(tmp_path))
    assert steps == [steps[0]] * 3
    assert steps[0][0] == 4
    assert steps[0][1] > 0


def watch_depth() -> tuple[int, bool]:
    check = NanCheck()
    check.install()
    part = Fails()
    part.is_due = True
    with pytest.raises(ValueError, match="once"):
        nn.Sequential(part)(torch.ones(4, 3))
    return len(check._depth), check._running is None


def test_a_call_that_raised_is_over_for_the_check_of_numbers() -> None:
    assert run_ranks(watch_depth, 1) == [(0, True)]


def bind_scale(optimizer: torch.optim.Optimizer) -> LossScale:
    scale = LossScale(Scaler(initial=4.0))
    scale.bind(optimizer)
    return scale


def skip_a_step() -> list[tuple[float, int]]:
    """Train with a loss that is too large in the second of four steps, which is left out."""
    px.init()
    check = NanCheck()
    check.install()
    net = nn.Linear(1, 1, bias=False)
    nn.init.ones_(net.weight)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.25)
    scale = bind_scale(optimizer)
    seen = []
    for x in (1.0, 1e38, 1.0, 1.0):
        scale.scale(net(torch.full((2, 1), x)).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append((net.weight.item(), len(check._calls)))
    return seen


def test_a_step_left_out_for_its_scaled_gradients_does_not_fail_the_next_one() -> None:
    assert run_ranks(skip_a_step, 1) == [[(0.5, 0), (0.5, 0), (0.0, 0), (-0.5, 0)]]


def scale_large_losses() -> list[float]:
    """Train with losses that are finite, and infinite once they are scaled."""
    px.init()
    nan_check.check_nan_inf()
    net = nn.Linear(1, 1)
    nn.init.ones_(net.weight)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    scale = bind_scale(optimizer)
    for _ in range(2):
        scale.scale(net(torch.ones(1, 1)).sum() + 2e38).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [scale.skipped, net.weight.item()]


def test_a_scaled_loss_may_be_infinite_where_gradients_are_not() -> None:
    assert run_ranks(scale_large_losses, 1) == [[0, 0.0]]


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        return index


def leave_epochs() -> list[tuple[list[int], list[int] | None]]:
    sample_ids.watch()
    loader = DataLoader(Numbers(), batch_size=2, num_workers=1, persistent_workers=True)
    seen = []
    for _ in range(3):
        for count, batch in enumerate(loader):
            seen.append((batch.tolist(), sample_ids.current()))
            if count == 1:
                break
    return seen


def test_samples_of_an_epoch_that_was_left_are_not_those_of_the_next() -> None:
    (seen,) = run_ranks(leave_epochs, 1)
    assert seen == [([0, 1], [0, 1]), ([2, 3], [2, 3])] * 3


def count_losses() -> int:
    losses: list[Tensor] = []
    watch_losses(losses.append)
    weight = torch.ones(1, requires_grad=True)
    weight.sum().backward()
    with repeated_pass():
        weight.sum().backward()
    return len(losses)


def test_the_loss_of_a_repeated_backward_pass_counts_once() -> None:
    assert run_ranks(count_losses, 1) == [1]


def test_the_flight_log_follows_an_optimizers_groups_and_keeps_no_parameters() -> None:
    log = FlightLog()
    param = nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer = torch.optim.SGD([param], lr=0.1)
    log._before_step(optimizer, (), {})
    (before,), log._reduced = log._reduced, []
    late = nn.Parameter(torch.ones(2))
    late.grad = torch.full((2,), 2.0)
    optimizer.add_param_group({"params": [late]})
    log._before_step(optimizer, (), {})
    (after,) = log._reduced
    assert after != before, "the gradient of the later group counts"
    reference: Any = weakref.ref(late)
    del optimizer, late, param
    gc.collect()
    assert reference() is None
