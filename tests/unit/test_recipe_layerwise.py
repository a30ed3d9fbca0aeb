"""LARS and LAMB equal their papers' algorithms, written out below, in the user's own optimizer object."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import phalanx as px
from phalanx.errors import ConfigError, StrategyError
from phalanx.parallel.optim.gradient_accumulation import accumulate_gradients
from phalanx.parallel.optim.lamb import use_lamb
from phalanx.parallel.optim.lars import use_lars
from phalanx.parallel.step.learning_rate import LearningRateFactor, apply_factor

STEPS = 5


def net() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    nn.init.zeros_(model[2].bias)  # norm zero at first
    return model


def names(model: nn.Module):
    return {param: name for name, param in model.named_parameters()}.get


def rates(step: int) -> float:
    return 0.5 * 0.7**step


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range = range(STEPS)) -> None:
    for step in steps:
        optimizer.param_groups[0]["lr"] = rates(step)
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()


def loss(model: nn.Module, step: int) -> Tensor:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return model(x).square().sum(1).mean()


def norm(tensor: Tensor) -> float:
    return math.sqrt(sum(value * value for value in tensor.flatten().tolist()))


def lars_by_hand(model: nn.Module, coeff: float, decay: float, epsilon: float, nesterov: bool, excluded: str) -> None:
    velocity = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for step in range(STEPS):
        model.zero_grad()
        loss(model, step).backward()
        for name, param in model.named_parameters():
            w, g = param.data, param.grad
            beta, local = decay, 1.0
            if excluded and excluded in name:
                beta = 0.0
            elif norm(w) > 0 and norm(g) > 0:
                local = coeff * norm(w) / (norm(g) + beta * norm(w) + epsilon)
            change = rates(step) * local * (g + beta * w)
            velocity[name] = 0.9 * velocity[name] + change
            param.data = w - (change + 0.9 * velocity[name] if nesterov else velocity[name])


def lamb_by_hand(model: nn.Module, decay: float, excluded: str) -> None:
    m = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    v = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for step in range(STEPS):
        model.zero_grad()
        loss(model, step).backward()
        for name, param in model.named_parameters():
            w, g = param.data, param.grad
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.999 * v[name] + 0.001 * g * g
            r = (m[name] / (1 - 0.9 ** (step + 1))) / ((v[name] / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8)
            r = r + (0.0 if excluded and excluded in name else decay) * w
            ratio = norm(w) / norm(r) if norm(w) > 0 and norm(r) > 0 else 1.0
            param.data = w - rates(step) * ratio * r


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("excluded", ["", "bias"])
def test_lars_equals_its_paper(nesterov: bool, excluded: str) -> None:
    model, reference = net(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, nesterov=nesterov)
    exclude = [excluded] if excluded else []
    use_lars(optimizer, coeff=0.05, weight_decay=0.01, epsilon=1e-3, exclude=exclude, names=names(model))
    train(model, optimizer)
    lars_by_hand(reference, 0.05, 0.01, 1e-3, nesterov, excluded)
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("excluded", ["", "bias"])
def test_lamb_equals_its_paper(kind: type[torch.optim.Adam], excluded: str) -> None:
    model, reference = net(), net()
    optimizer = kind(model.parameters(), lr=0.5)
    use_lamb(optimizer, weight_decay=0.02, exclude=[excluded] if excluded else [], names=names(model))
    train(model, optimizer)
    lamb_by_hand(reference, 0.02, excluded)
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=1e-11, atol=1e-14)


def lars_on(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    use_lars(optimizer, coeff=0.05)
    return optimizer


def lamb_on(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    use_lamb(optimizer)
    return optimizer


@pytest.mark.parametrize("made_on", [lars_on, lamb_on])
def test_a_resumed_job_goes_on_bit_for_bit(made_on) -> None:
    whole, first = net(), net()
    train(whole, made_on(whole))
    optimizer = made_on(first)
    train(first, optimizer, range(3))
    second = copy.deepcopy(first)
    resumed = made_on(second)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(second, resumed, range(3, STEPS))
    torch.testing.assert_close(second.state_dict(), whole.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(("made_on", "scheduler_first"), [(lars_on, False), (lars_on, True), (lamb_on, False)])
def test_hooks_schedulers_and_merging_act_as_around_torchs_rule(made_on, scheduler_first: bool) -> None:
    px.init()
    model, reference = net(), net()
    optimizer = made_on(model) if not scheduler_first else torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    if scheduler_first:
        use_lars(optimizer, coeff=0.05)
    apply_factor(optimizer, LearningRateFactor(3.0, 0))
    accumulate_gradients(optimizer, model, 2)
    for step in range(4):
        optimizer.zero_grad()
        loss(model, step // 2).backward()
        optimizer.step()
        if step % 2:
            scheduler.step()
    own = made_on(reference)
    for step in range(2):
        own.param_groups[0]["lr"] = 3.0 * 0.5 * 0.5**step
        own.zero_grad()
        loss(reference, step).backward()
        own.step()
    torch.testing.assert_close(model.state_dict(), reference.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.125
    assert type(optimizer) is type(own)


def test_a_closure_is_called_once() -> None:
    model = net()
    optimizer = lars_on(model)
    before = model[0].weight.detach().clone()

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(model, 0)
        value.backward()
        return value

    assert optimizer.step(closure).item() > 0
    assert not torch.equal(model[0].weight, before)


def test_what_the_rules_cannot_stand_in_for_is_an_error() -> None:
    params = list(net().parameters())
    with pytest.raises(
        StrategyError, match=r"strategy\.lars trains torch\.optim\.SGD by another rule, and found .*Adam"
    ):
        use_lars(torch.optim.Adam(params))
    with pytest.raises(StrategyError, match=r"torch\.optim\.Adam or torch\.optim\.AdamW by another rule, .*SGD"):
        use_lamb(torch.optim.SGD(params, lr=0.1))
    with pytest.raises(StrategyError, match=r"lars has no dampening, and the optimizer sets dampening=0\.1"):
        use_lars(torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.1))
    with pytest.raises(
        StrategyError, match=r"weight_decay=0\.1, and strategy\.lamb_configs for lamb_weight_decay=0\.01"
    ):
        use_lamb(torch.optim.AdamW(params, weight_decay=0.1))


def test_exclusion_needs_names_and_sparse_gradients_are_refused() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    use_lars(optimizer, exclude=["bias"])
    loss(model, 0).backward()
    with pytest.raises(ConfigError, match=r"goes by names, .* no distributed model names"):
        optimizer.step()
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    use_lars(optimizer)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="sparse gradient"):
        optimizer.step()
