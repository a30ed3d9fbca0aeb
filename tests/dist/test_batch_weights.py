"""Gradients are of the batch that was trained on, whatever the loop reads, calls and returns."""

from __future__ import annotations

import copy
import gc
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as px
from phalanx.errors import ConfigError
from ranks import run_ranks

pytestmark = pytest.mark.dist

GLOBAL = 4
STAGES = {1: (0,), 2: (0, 1, 3), 3: (2,)}
"""Of sharding, by the number of ranks; 0 is none."""


@dataclass
class Output:
    logits: Tensor


class Net(nn.Module):
    """An autoencoder that can be called in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dec = nn.Linear(5, 3), nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dec(torch.tanh(self.enc(x)))

    def loss(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.dec(torch.tanh(self.enc(x))), x)


class DataclassNet(Net):
    def forward(self, x: Tensor) -> Output:
        return Output(super().forward(x))


class SeveralNet(Net):
    """Both outputs are trained, one computed from the other; both are changed in place by some loops."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.enc(x))
        return self.dec(hidden), hidden


def rows(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Rows(torch.utils.data.Dataset[tuple[Tensor]]):
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor]:
        return (self.x[index],)


def strategy_of(stage: int, merged: bool = False) -> px.DistributedStrategy:
    settings: dict[str, Any] = {}
    if stage:
        settings |= {"sharding": True, "sharding_configs": {"stage": stage}}
    if merged:
        settings |= {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
    return px.DistributedStrategy(**settings)


def net(kind: type[nn.Module] = Net) -> tuple[nn.Module, nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = kind().double()
    reference = copy.deepcopy(model)
    return model, reference, torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(reference.parameters(), 0.1)


def off(model: nn.Module, reference: nn.Module) -> float:
    """Return the largest relative difference of parameters."""

    def whole(param: Tensor) -> Tensor:
        return (param.full_tensor() if hasattr(param, "full_tensor") else param).detach()

    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(((whole(p) - r).norm() / r.norm()).item() for p, r in pairs)


def batches_of(x: Tensor) -> Iterator[Tensor]:
    yield from x.split(GLOBAL)


def loader_of(model: nn.Module, optimizer: Any, x: Tensor, **options: Any) -> Any:
    return px.distribute(model, optimizer, Rows(x), global_batch=GLOBAL, shuffle=False, **options)[2]


Loss = Callable[[nn.Module, Tensor], Tensor]


def rebuilt(model: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(model(x), x)


def step(optimizer: Any, loss: Tensor) -> None:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


# --- loops ----------------------------------------------------------------------------------------------------------


def loops(count: int, stage: int) -> dict[str, float]:
    """Train in each loop; return how far each is off a plain loop of one process over whole batches."""
    found = {}
    for name, loop in LOOPS.items():
        model, reference, optimizer, plain = net()
        x = rows(count)
        loader = loader_of(model, optimizer, x, strategy=strategy_of(stage))
        loop(model, optimizer, loader)
        for batch in batches_of(x):
            step(plain, rebuilt(reference, batch))
        found[name] = off(model, reference)
        del model, optimizer, loader
        gc.collect()
        gc.collect()
    return found


def fetched_ahead(model: nn.Module, optimizer: Any, loader: Any) -> None:
    batches = iter(loader)
    ahead = next(batches, None)
    while ahead is not None:
        (x,), ahead = ahead, next(batches, None)
        step(optimizer, rebuilt(model, x))


def listed(model: nn.Module, optimizer: Any, loader: Any) -> None:
    for (x,) in list(loader):
        step(optimizer, rebuilt(model, x))


def viewed(model: nn.Module, optimizer: Any, loader: Any) -> None:
    for (x,) in list(loader):
        step(optimizer, rebuilt(model, x.view(1, -1, 5)))


def named_by_the_script(model: nn.Module, optimizer: Any, loader: Any) -> None:
    for (x,) in list(loader):
        px.use_batch(x)
        step(optimizer, rebuilt(model, x.clone()))


def copied(model: nn.Module, optimizer: Any, loader: Any) -> None:
    model(rows(2).clone())  # a probe, before there is a batch
    for (x,) in loader:
        step(optimizer, rebuilt(model, x.clone()))


def looked_at_before(model: nn.Module, optimizer: Any, loader: Any) -> None:
    first = next(iter(loader))
    loader.set_epoch(0)
    for (x,) in loader:
        step(optimizer, rebuilt(model, x.clone()))
    del first


def counted_before(model: nn.Module, optimizer: Any, loader: Any) -> None:
    sum(len(x) for (x,) in loader)
    loader.set_epoch(0)
    for (x,) in loader:
        step(optimizer, rebuilt(model, x.clone()))


def validated_inside(model: nn.Module, optimizer: Any, loader: Any) -> None:
    held_out = iter(px.data.ShardedLoader(Rows(rows(5, 2)), global_batch=GLOBAL, shuffle=False, training=False))
    for (x,) in loader:
        y = next(held_out, None)
        if y is not None:
            with torch.no_grad():
                model(y[0].clone())
        step(optimizer, rebuilt(model, x.clone()))


def method(model: nn.Module, optimizer: Any, loader: Any) -> None:
    for (x,) in loader:
        step(optimizer, model.loss(x))


LOOPS = {
    loop.__name__: loop
    for loop in (
        fetched_ahead,
        listed,
        viewed,
        named_by_the_script,
        copied,
        looked_at_before,
        counted_before,
        validated_inside,
        method,
    )
}


def run_loops(cases: list[tuple[int, int]]) -> dict[str, float]:
    px.init()
    found = {}
    for count, stage in cases:
        found |= {f"{name}, {count} rows, stage {stage}": value for name, value in loops(count, stage).items()}
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_batch_weighs_by_its_own_rows_in_every_loop(ranks: int) -> None:
    # The last batch of 5 rows leaves a rank without a row that counts.
    cases = [(7, 0), (5, 0)] if ranks != 2 else [(7, 0), (5, 0), (5, 2)]
    for found in run_ranks(run_loops, ranks, cases, timeout_s=110):
        assert {name: value for name, value in found.items() if value > 1e-13} == {}


# --- models ---------------------------------------------------------------------------------------------------------


def models(stages: tuple[int, ...]) -> dict[str, float]:
    px.init()
    found = {}
    for stage in stages:
        for merged in (False, True):
            for name, case in MODELS.items():
                found[f"{name}, stage {stage}{', merged' * merged}"] = case(stage, merged)
                gc.collect()
                gc.collect()
    found["two losses of two loaders"] = two_loaders()
    found["several outputs of two loaders"] = two_loaders_several()
    return found


def trained(kind: type[nn.Module], loss: Loss, stage: int, merged: bool) -> float:
    model, reference, optimizer, plain = net(kind)
    x = rows(8 if merged else 7)
    for (batch,) in loader_of(model, optimizer, x, strategy=strategy_of(stage, merged)):
        step(optimizer, loss(model, batch))
    if merged:
        sum(loss(reference, batch) / 2 for batch in batches_of(x)).backward()
        plain.step()
    else:
        for batch in batches_of(x):
            step(plain, loss(reference, batch))
    return off(model, reference)


def called_by_method(stage: int, merged: bool) -> float:
    return trained(Net, lambda model, x: model.loss(x), stage, merged)


def dataclass_output(stage: int, merged: bool) -> float:
    return trained(DataclassNet, lambda model, x: F.mse_loss(model(x).logits, x), stage, merged)


def several_outputs(stage: int, merged: bool) -> float:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        out, hidden = model(x)
        return F.mse_loss(out, x) + hidden.pow(2).mean()

    return trained(SeveralNet, loss, stage, merged)


def of_its_own_output(stage: int, merged: bool) -> float:
    return trained(Net, lambda model, x: F.mse_loss(model(model(x)), x), stage, merged)


def two_backward_passes(stage: int, merged: bool) -> float:
    """Through one forward pass."""
    model, reference, optimizer, plain = net()
    x = rows(8 if merged else 7)
    for (batch,) in loader_of(model, optimizer, x, strategy=strategy_of(stage, merged)):
        out = model(batch)
        out.pow(2).mean().backward(retain_graph=True)
        step(optimizer, out.pow(4).mean())
    losses = [out.pow(2).mean() + out.pow(4).mean() for out in [reference(x)]] if merged else []
    for loss in losses:
        step(plain, loss)
    for batch in () if merged else batches_of(x):
        out = reference(batch)
        step(plain, out.pow(2).mean() + out.pow(4).mean())
    return off(model, reference)


MODELS = {
    case.__name__: case
    for case in (called_by_method, dataclass_output, several_outputs, of_its_own_output, two_backward_passes)
}


def two_loaders() -> float:
    model, reference, optimizer, plain = net()
    x, u = rows(7), rows(8, 2)
    first = loader_of(model, optimizer, x, strategy=strategy_of(0))
    second = px.data.ShardedLoader(Rows(u), global_batch=GLOBAL, shuffle=False)
    for (a,), (b,) in zip(first, second, strict=True):
        step(optimizer, rebuilt(model, a) + 2 * rebuilt(model, b))
    for a, b in zip(batches_of(x), batches_of(u), strict=True):
        step(plain, rebuilt(reference, a) + 2 * rebuilt(reference, b))
    return off(model, reference)


def two_loaders_several() -> float:
    model, reference, optimizer, plain = net(SeveralNet)
    x, u = rows(7), rows(8, 2)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        out, hidden = model(x)
        return F.mse_loss(out, x) + hidden.pow(2).mean()

    first = loader_of(model, optimizer, x, strategy=strategy_of(0))
    second = px.data.ShardedLoader(Rows(u), global_batch=GLOBAL, shuffle=False)
    for (a,), (b,) in zip(first, second, strict=True):
        step(optimizer, loss(model, a) + loss(model, b))
    for a, b in zip(batches_of(x), batches_of(u), strict=True):
        step(plain, loss(reference, a) + loss(reference, b))
    return off(model, reference)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_it_does_not_matter_how_a_model_is_called_and_what_it_returns(ranks: int) -> None:
    for found in run_ranks(models, ranks, STAGES[ranks], timeout_s=110):
        assert {name: value for name, value in found.items() if value > 1e-13} == {}


# --- two models -----------------------------------------------------------------------------------------------------


def adversaries(stage: int) -> dict[str, float]:
    """The GAN of the guide, noise of its own drawn from the data so that one process draws the same."""
    px.init()
    torch.manual_seed(0)
    both = [nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, out)).double() for out in (5, 1)]
    plain = copy.deepcopy(both)
    x = rows(7)

    def epoch(generator: nn.Module, critic: nn.Module, batches: Any) -> None:
        of_generator, of_critic = (torch.optim.SGD(m.parameters(), 0.1) for m in (generator, critic))
        if generator is both[0]:
            batches = loader_of(generator, of_generator, x, strategy=strategy_of(stage))
            px.distribute(critic, of_critic)
        for (real,) in batches:
            noise = real.flip(1) * 2
            fake = generator(noise).detach()
            step(of_critic, F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean())
            critic.requires_grad_(False)
            step(of_generator, F.softplus(-critic(generator(noise))).mean())
            critic.requires_grad_(True)

    epoch(*both, None)
    epoch(*plain, [(batch,) for batch in batches_of(x)])
    return {name: off(m, r) for name, m, r in zip(("generator", "critic"), both, plain, strict=True)}


@pytest.mark.parametrize("stage", [0, 1])
def test_two_models_in_a_chain_weigh_an_uneven_batch_once(stage: int) -> None:
    for found in run_ranks(adversaries, 2, stage):
        assert {name: value for name, value in found.items() if value > 1e-13} == {}


# --- what cannot be known -------------------------------------------------------------------------------------------


def refused() -> list[str]:
    px.init()
    said = []
    model, _, optimizer, _ = net()
    loader = loader_of(model, optimizer, rows(7))
    try:
        for (x,) in list(loader):
            step(optimizer, rebuilt(model, x.clone()))
    except ConfigError as error:
        said.append(str(error))
    for even in list(loader_of(net()[0], None, rows(8))):
        px.use_batch(UserDict(even=even[0]))
    try:
        px.use_batch(rows(2))
    except ConfigError as error:
        said.append(str(error))
    return said


def test_a_batch_that_cannot_be_known_is_refused_before_the_first_update() -> None:
    for ambiguous, foreign in run_ranks(refused, 3):
        assert "a gradient is of a batch of 4 or 3 rows, which weigh differently on 3 ranks" in ambiguous
        assert "px.use_batch(batch) before the forward pass" in ambiguous
        assert "tensors that are of no batch of a ShardedLoader" in foreign


def sums() -> list[float]:
    """A sum over rows, under the setting for it."""
    px.init()
    model, reference, optimizer, plain = net()
    x = rows(7)
    strategy = px.DistributedStrategy(gradient_scale_configs={"scale_strategy": "sum"})
    for (batch,) in loader_of(model, optimizer, x, strategy=strategy):
        step(optimizer, F.mse_loss(model(batch), batch, reduction="sum") / 100)
    for batch in batches_of(x):
        step(plain, F.mse_loss(reference(batch), batch, reduction="sum") / 100)
    return [off(model, reference)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_gradients_that_are_summed_are_those_of_the_sum_over_all_rows(ranks: int) -> None:
    for (found,) in run_ranks(sums, ranks):
        assert found < 1e-13


def lone_rows() -> dict[str, str | None]:
    """11 rows in batches of 8: the last leaves rank 1 of 2 a single row."""
    px.init()
    layers = {
        "plain": nn.BatchNorm1d(5),
        "images": nn.Sequential(nn.Unflatten(1, (1, 5)), nn.BatchNorm1d(1), nn.Flatten()),
        "left out": nn.BatchNorm1d(5),
    }
    found: dict[str, str | None] = {}
    for name, layer in layers.items():
        model = nn.Sequential(layer, nn.Linear(5, 5)).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        options = {"global_batch": 8, "shuffle": False, "drop_last": name == "left out"}
        loader = px.distribute(model, optimizer, Rows(rows(11)), **options)[2]
        before, found[name] = copy.deepcopy(model[1].weight), None
        try:
            for (x,) in loader:
                step(optimizer, rebuilt(model, x))
        except ConfigError as error:
            found[name] = str(error) if torch.equal(before, model[1].weight) else "too late"
    return found


def test_a_batch_norm_that_would_fail_in_the_last_batch_is_refused_before_the_first_update() -> None:
    for found in run_ranks(lone_rows, 2):
        assert "leaves a rank of 2 a single row, and BatchNorm1d '0' needs more than 1 row" in found.pop("plain")
        assert found == {"images": None, "left out": None}
