"""What acts at `optimizer.step()` acts in one order, whatever the order of the calls that asked for it."""

import itertools
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import phalanx as px
from phalanx import fleet
from phalanx.errors import ConfigError
from phalanx.parallel.optim.clip import clip_steps
from phalanx.parallel.optim.ema import EMA
from phalanx.parallel.optim.gradient_accumulation import accumulate_gradients
from phalanx.parallel.precision.loss_scale import LossScale
from phalanx.parallel.precision.master_weights import keep_master_weights
from phalanx.parallel.session import StepPhase, session
from phalanx.parallel.step.hooks import add_action, list_phases
from phalanx.parallel.step.learning_rate import LearningRateFactor, apply_factor
from phalanx.plan.value import AllReduce, ParamRule, Plan, Scaler

Calls = dict[str, Callable[[], object]]


class HalfAndFull(nn.Module):
    """Some parameters in float16, whose gradients stay scaled until the update, and some in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2).half()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)).half()).float()


def train(order: tuple[str, ...]) -> tuple[list[Tensor], tuple[str, ...]]:
    """Return parameters, their averages and momentum after some steps, and the phases of a step."""
    px.init()
    torch.manual_seed(0)
    model = HalfAndFull()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    averages: list[EMA] = []
    calls: Calls = {
        "ema": lambda: averages.append(EMA(model, 0.5, warmup=False, optimizer=optimizer)),
        "clip": lambda: clip_steps(optimizer, max_norm=0.01),
        "accumulate": lambda: accumulate_gradients(optimizer, model, 2),
        "scale": lambda: LossScale(Scaler(initial=1024.0, growth_every=2)).bind(optimizer),
        "master": lambda: keep_master_weights(optimizer),
        "rate": lambda: apply_factor(optimizer, LearningRateFactor(4.0, 3)),
    }
    for name in order:
        calls[name]()
    generator = torch.Generator().manual_seed(1)
    for number in range(8):
        x = torch.randn(4, 3, generator=generator)
        loss = model(x).square().mean()
        optimizer.scale(loss * (float("inf") if number in (4, 5) else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    momentum = [state["momentum_buffer"] for state in optimizer.state.values()]
    return [*model.parameters(), *averages[0].state_dict()["shadow"].values(), *momentum], list_phases(optimizer)


def test_no_order_of_calls_changes_a_bit() -> None:
    names = ("ema", "clip", "accumulate", "scale", "master", "rate")
    expected, phases = train(names)
    assert phases == (
        "accumulate gradients", "skip overflow", "scale learning rate", "use master weights", "unscale gradients",
        "clip gradients", "update", "restore learning rate", "round master weights", "move averages",
    )  # fmt: skip
    orders = list(itertools.permutations(names))
    for order in [orders[-1], *random.Random(0).sample(orders, 40)]:
        values, same_phases = train(order)
        assert same_phases == phases
        for value, reference in zip(values, expected, strict=True):
            assert torch.equal(value, reference), order


def test_actions_of_one_phase_run_in_the_order_in_which_they_were_added() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    calls: list[int] = []
    for number in range(3):
        add_action(optimizer, StepPhase.CLIP_GRADIENTS, lambda _, number=number: calls.append(number))
    optimizer.step()
    assert calls == [0, 1, 2]


@pytest.mark.parametrize("is_model_first", [True, False])
def test_explain_prints_the_order_of_a_step(is_model_first: bool) -> None:
    strategy = px.DistributedStrategy(clip=True, clip_configs={"norm": 1.0}, ema=True, gradient_merge=True)
    strategy.gradient_merge_configs = {"k_steps": 2}
    fleet.init(is_collective=True, strategy=strategy)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = [lambda: fleet.distributed_model(model), lambda: fleet.distributed_optimizer(optimizer)]
    for call in calls if is_model_first else reversed(calls):
        call()
    order = (
        "accumulate gradients, check parameters, reserve memory, push tables, clip gradients, update, pull tables, "
        "move averages"
    )
    for explanation in (px.explain(model), px.explain(model, optimizer=optimizer)):
        assert f"optimizer.step(): {order}" in " ".join(str(explanation).split())


def test_weighted_mean_asks_about_the_models_of_its_loss_only() -> None:
    px.init()
    summed, averaged = nn.Linear(2, 1), nn.Linear(2, 1)
    px.apply(Plan(params=(ParamRule(match="*", update=AllReduce(reduce="sum")),)), summed)
    px.apply(Plan(params=(ParamRule(match="*", update=AllReduce()),)), averaged)
    x = torch.ones(4, 2)
    px.weighted_mean(averaged(x).sum(), 4).backward()
    assert torch.equal(averaged.weight.grad, torch.ones(1, 2))
    with pytest.raises(ConfigError, match="weighted_mean makes a mean"):
        px.weighted_mean(summed(x).sum(), 4)


def test_records_go_with_their_objects() -> None:
    px.init()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clip_steps(optimizer, max_norm=1.0)
    assert optimizer in session.optimizers
    del optimizer
    assert len(session.optimizers) == 0
