"""The average of a model's weights follows its formula and changes places with them for evaluation."""

import pytest
import torch
from torch import Tensor, nn

import phalanx as px
from phalanx.errors import ConfigError
from phalanx.parallel.optim.ema import EMA, keep_average
from phalanx.parallel.optim.gradient_accumulation import accumulate_gradients


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(6, 3)).square().mean().backward()
    optimizer.step()


def floats(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in model.state_dict().items() if t.is_floating_point()}


@pytest.mark.parametrize("warmup", [False, True])
def test_the_average_follows_its_formula(warmup: bool) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ema = EMA(model, 0.6, warmup=warmup, optimizer=optimizer)
    expected = floats(model)
    for step in range(12):
        train(model, optimizer)
        decay = min(0.6, (1 + step) / (10 + step)) if warmup else 0.6
        expected = {name: decay * old + (1 - decay) * floats(model)[name] for name, old in expected.items()}
    torch.testing.assert_close(ema.state_dict()["shadow"], expected)
    assert {"1.running_mean", "0.weight"} < set(expected)


def test_swapped_evaluates_the_average_and_gives_the_weights_back_also_after_an_error() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ema = EMA(model, 0.5, optimizer=optimizer)
    train(model, optimizer)
    own, averages = floats(model), ema.state_dict()["shadow"]
    with ema.swapped():
        torch.testing.assert_close(floats(model), averages, rtol=0, atol=0)
    torch.testing.assert_close(floats(model), own, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), ema.swapped():
        model(torch.ones(1, 7))
    torch.testing.assert_close(floats(model), own, rtol=0, atol=0)
    train(model, optimizer)


def test_a_held_back_step_moves_no_average() -> None:
    px.init()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulate_gradients(optimizer, model, 2)
    ema = EMA(model, optimizer=optimizer)
    for _ in range(4):
        train(model, optimizer)
    assert ema.updates == 2


def test_averages_of_low_precision_are_float32() -> None:
    model = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    ema = EMA(model, 0.999, warmup=False)
    nn.init.zeros_(model.weight)
    for _ in range(3):
        ema.update()
    assert ema.state_dict()["shadow"]["weight"].item() == pytest.approx(0.999**3)
    with ema.swapped():
        assert model.weight.dtype == torch.bfloat16


def test_a_state_goes_on_in_another_model() -> None:
    model, other = net(), net()
    ema, resumed = EMA(model), EMA(other)
    nn.init.ones_(model[0].weight)
    ema.update()
    resumed.load_state_dict(ema.state_dict())
    torch.testing.assert_close(resumed.state_dict(), ema.state_dict())
    assert resumed.state_dict()["shadow"]["0.weight"] is not ema.state_dict()["shadow"]["0.weight"]


def test_what_cannot_be_averaged_is_an_error() -> None:
    model = net()
    with pytest.raises(ConfigError, match=r"below 1, found 1\.0"):
        EMA(model, 1.0)
    ema = EMA(model)
    with ema.swapped(), pytest.raises(ConfigError, match=r"inside `with ema\.swapped"):
        ema.update()
    with ema.swapped(), pytest.raises(ConfigError, match="inside itself"), ema.swapped():
        pass
    with pytest.raises(ConfigError, match=r"only the model has '1\.weight'"):
        ema.load_state_dict({"updates": 0, "shadow": {k: v for k, v in floats(model).items() if k != "1.weight"}})
    with pytest.raises(ConfigError, match=r"'0\.bias' has shape \(1,\) in the state, and \(4,\) here"):
        ema.load_state_dict({"updates": 0, "shadow": {**floats(model), "0.bias": torch.zeros(1)}})
    model[0].weight = nn.Parameter(torch.zeros(2, 3))
    with pytest.raises(ConfigError, match=r"'0\.weight' was \(4, 3\) on cpu .* Make the EMA after"):
        ema.update()


def test_a_second_optimizer_of_a_model_is_told_that_its_updates_do_not_count(caplog, phalanx_propagates) -> None:
    model = net()
    for _ in range(2):
        keep_average(model, torch.optim.SGD(model.parameters(), lr=0.1), 0.9, warmup=True)
    assert caplog.text.count("ema follows the updates of the first optimizer of a model") == 1
