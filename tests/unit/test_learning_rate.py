"""Learning rates that grow with the global batch warm up first, and leave the user's own value alone."""

import itertools

import pytest
import torch

from phalanx.errors import StrategyError
from phalanx.parallel.step.learning_rate import LearningRateFactor, apply_factor, factor_for
from phalanx.strategy import DistributedStrategy


def test_a_rate_is_left_alone_unless_asked():
    assert factor_for(DistributedStrategy(), 8, 256, 100) is None


def test_a_scaled_rate_warms_up_for_five_epochs_by_default():
    assert factor_for(DistributedStrategy(scale_lr="linear"), 8, 256, 100) == LearningRateFactor(8.0, 500)
    assert factor_for(DistributedStrategy(scale_lr="linear"), 8, None, None) == LearningRateFactor(8.0, 500)


def test_the_base_batch_decides_the_scale():
    strategy = DistributedStrategy(scale_lr="sqrt", base_batch=64, warmup_steps=10)
    assert factor_for(strategy, 2, 256, 100) == LearningRateFactor(2.0, 10)


def test_a_rate_cannot_grow_with_a_global_batch_that_is_not_known():
    strategy = DistributedStrategy(scale_lr="linear", base_batch=64)
    with pytest.raises(StrategyError, match=r"base_batch = 64 asks for .* not known here. Hand the data to"):
        factor_for(strategy, 2, None, None)


@pytest.mark.parametrize(("scale", "first", "last"), [(4.0, 1.3, 4.0), (1.0, 0.1, 1.0)])
def test_the_factor_rises_linearly_and_stays(scale, first, last):
    factor = LearningRateFactor(scale, 10)
    values = [factor.at(step) for step in range(12)]
    assert values[0] == pytest.approx(first)
    assert values[9:] == [last] * 3
    steps = [b - a for a, b in itertools.pairwise(values[:10])]
    assert all(s == pytest.approx(steps[0]) for s in steps)


def test_the_step_uses_the_factor_and_the_user_keeps_the_value():
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    apply_factor(optimizer, LearningRateFactor(3.0, 2))
    moved = []
    for _ in range(3):
        before = param.item()
        param.grad = torch.ones(1)
        optimizer.step()
        moved.append(before - param.item())
        scheduler.step()
    assert moved == pytest.approx([0.1 * 2.0, 0.05 * 3.0, 0.025 * 3.0])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0125)


def test_a_step_that_was_interrupted_leaves_no_factor_behind():
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [param]}, {"params": [torch.nn.Parameter(torch.zeros(1))]}], lr=0.1)
    apply_factor(optimizer, LearningRateFactor(3.0, 0))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    hook = optimizer.register_step_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    hook.remove()
    optimizer.param_groups[1]["lr"] = 0.4  # the script's own from now on
    optimizer.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.4]
