"""A captured step: what cannot be captured is named anywhere; the graph itself needs a card."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as px
from phalanx.cluster.role.role import Role
from phalanx.comm.context import Context
from phalanx.errors import ConfigError
from phalanx.train.step.cuda_graph import WARMUP_STEPS, GraphedStep, forbid_host_syncs
from phalanx.train.step.sink import can_capture
from phalanx.train.step.step import TrainStep

ON_CARD = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Inner(nn.Module):
    def __init__(self, does: str) -> None:
        super().__init__()
        self.does = does

    def forward(self, x: Tensor) -> Tensor:
        if self.does == "index":
            return x[x > 0]
        if self.does == "nonzero":
            return x.detach().nonzero().sum() * x.sum()
        if self.does == "item":
            return x * x.detach().sum().item()
        return x.clamp(min=0)[torch.tensor([0, 1])]


class Net(nn.Module):
    def __init__(self, does: str) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.inner = Inner(does)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.fc(x))


@pytest.mark.parametrize(
    ("does", "named"), [("index", "index"), ("nonzero", "nonzero"), ("item", r"\.item\(\), float\(\) or if")]
)
def test_what_waits_for_values_is_named_with_its_module(does: str, named: str) -> None:
    with pytest.raises(ConfigError, match=f"{named} in Net.inner makes the host wait"), forbid_host_syncs():
        Net(does)(torch.ones(3, 4))


def test_an_ordinary_step_passes() -> None:
    with forbid_host_syncs():
        Net("")(torch.ones(3, 4)).sum().backward()
        F.cross_entropy(nn.Linear(4, 3)(torch.ones(2, 4)), torch.tensor([0, 2])).backward()
        px.SoftmaxCrossEntropyExpand()(nn.Linear(4, 3)(torch.ones(2, 4)), torch.full((2, 3), 1 / 3)).backward()


@pytest.mark.parametrize(
    ("strategy", "world_size", "compiled", "said"),
    [
        (px.DistributedStrategy(), 1, False, None),
        (px.DistributedStrategy(), 2, False, "gradients of several ranks"),
        (px.DistributedStrategy(), 1, True, "the step is compiled"),
        (
            px.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 2}),
            1,
            False,
            "gradient_merge",
        ),
        (px.DistributedStrategy(amp=True, amp_configs={"dtype": "float16"}), 1, False, "float16 changes the scale"),
        (px.DistributedStrategy(recompute=True), 1, False, "activations are computed again"),
    ],
)
@pytest.mark.usefixtures("phalanx_propagates")
def test_steps_that_are_no_graph_say_why_on_a_card_only(
    strategy: px.DistributedStrategy,
    world_size: int,
    compiled: bool,
    said: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = nn.Sequential(nn.Linear(4, 4))
    px.distribute(net, strategy=strategy)
    caplog.clear()
    caplog.set_level("INFO", "phalanx.train")
    on_cpu = Context(Role(world_size=world_size), torch.device("cpu"))
    assert not can_capture(net, on_cpu, compiled=compiled)
    assert not caplog.messages
    on_card = Context(Role(world_size=world_size), torch.device("cuda", 0))
    assert can_capture(net, on_card, compiled=compiled) is (said is None)
    assert [said in message for message in caplog.messages] == [True] * (said is not None)


class FakeStream:
    def wait_stream(self, _other: object) -> None:
        """Nothing to wait for."""


class FakeGraph:
    """Stands for a captured graph on a machine without a card: a replay computes from the buffers into the results."""

    def __init__(self, of: list[GraphedStep]) -> None:
        self._of = of

    def replay(self) -> None:
        (made,) = self._of
        assert made._result is not None
        *inputs, target = made._buffers
        loss, _ = made._run(tuple(inputs), target)
        made._result[0].copy_(loss.detach())
        for held, param in zip(made._gradients, made._params, strict=True):
            assert held is not None
            assert param.grad is not None
            held.copy_(param.grad)


def test_around_the_graph_batches_are_copied_in_and_results_out(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[GraphedStep] = []
    monkeypatch.setattr(torch.cuda, "current_stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: FakeGraph(made))
    monkeypatch.setattr(torch.cuda, "graph", contextlib.nullcontext)
    x, y = torch.randn(50, 6, generator=torch.Generator().manual_seed(1)), torch.arange(50) % 5

    def losses(captured: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Linear(6, 5)
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        step = TrainStep(net, F.cross_entropy, optimizer, {}, False, captured=captured)
        if isinstance(step._backward, GraphedStep):
            made.append(step._backward)
        return [step(x[start : start + 8], y[start : start + 8]).loss for start in [*range(0, 50, 8)] * 2]

    assert all(map(torch.equal, losses(True), losses(False)))
    # The short batch of each pass and the first steps run as they are.
    assert made[0].replays == 2 * 6 - WARMUP_STEPS


@pytest.mark.gpu
@ON_CARD
def test_a_replayed_step_gives_what_the_eager_one_gives() -> None:
    def losses(sink: bool) -> tuple[list[float], int]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))
        model = px.Model(net, nn.CrossEntropyLoss(), torch.optim.Adam(net.parameters(), 0.01))
        x, y = torch.randn(50, 6), torch.randint(5, (50,))
        seen: list[Tensor] = []

        class Losses(px.Callback):
            def on_update(self, run: object) -> None:
                seen.append(run.loss)  # type: ignore[attr-defined]

        # The rate changes while the graph stays: the update is outside it.
        schedule = px.LearningRateSchedule(torch.optim.lr_scheduler.StepLR(model.optimizer, 3, 0.5))  # type: ignore[arg-type]
        model.train(3, (x, y), [Losses(), schedule], dataset_sink_mode=sink, batch_size=8)
        step = next(iter(model._steps.values()))
        replays = step._backward.replays if isinstance(step._backward, GraphedStep) else 0
        return [loss.item() for loss in seen], replays

    eager, sunk = losses(False), losses(True)
    # 6 full batches and a short one an epoch; the short one and the first steps are eager.
    assert sunk[1] == 3 * 6 - (WARMUP_STEPS)
    torch.testing.assert_close(eager[0], sunk[0])


@pytest.mark.gpu
@ON_CARD
def test_a_step_that_cannot_be_captured_is_refused_in_its_first() -> None:
    net = Net("item")
    model = px.Model(net, nn.MSELoss(), torch.optim.SGD(net.parameters(), 0.1))
    with pytest.raises(ConfigError, match=r"in Net\.inner makes the host wait"):
        model.train(1, (torch.ones(8, 4), torch.ones(8, 4)), dataset_sink_mode=True, batch_size=4)
