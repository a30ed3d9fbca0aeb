"""Memory that runs out in the loss of a script's own loop: the same bits, or an error that says why not."""

from __future__ import annotations

import gc
import json
import pickle
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as px
from memory_traps import MESSAGE, MODELS, digest, limit_memory
from phalanx.parallel.memory.guard import loss_point
from phalanx.parallel.memory.guard.graphs import ReleasedGraphError
from phalanx.parallel.session import model_record

STEPS = 3
CROSS_ENTROPY = torch.ops.aten.cross_entropy_loss.default


class LossTrap:
    """Lets so many cross entropies run out of memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 0
        self._compute = CROSS_ENTROPY.decompose
        monkeypatch.setattr(CROSS_ENTROPY, "decompose", self._attempt, raising=False)

    def _attempt(self, *inputs: Any, **named: Any) -> Any:
        if self.left:
            self.left -= 1
            raise RuntimeError(MESSAGE)
        return self._compute(*inputs, **named)


@pytest.fixture(autouse=True)
def _limit() -> Iterator[None]:
    gc.freeze()
    limit_memory()
    yield
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    gc.unfreeze()


@pytest.fixture
def trap(monkeypatch: pytest.MonkeyPatch) -> LossTrap:
    return LossTrap(monkeypatch)


def train(
    kind: str, trap: LossTrap, failures: tuple[int, ...] = (0, 0, 0), word: str = "recompute"
) -> tuple[str, float]:
    """Return the bits after some steps, in each of which the loss fails so often, and a random number drawn then."""
    torch.manual_seed(0)
    net, x, y = MODELS[kind]()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    px.distribute(net, optimizer, strategy=px.DistributedStrategy(out_of_memory=word))
    for at, count in enumerate(failures):
        part = slice(16 * at, 16 * at + 16)
        trap.left = count
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x[part]), y[part])
        loss.backward()
        optimizer.step()
        assert not trap.left
    return digest(net), float(torch.rand(()))


class Failing:
    """Lets a node run out of memory when it is called for the first times."""

    def __init__(self, count: int) -> None:
        self.left = count

    def __call__(self, _gradients: Any) -> None:
        if self.left:
            self.left -= 1
            raise RuntimeError(MESSAGE)


def train_with_failing_node(kind: str, depth: int, count: int) -> tuple[str, float]:
    """Return the bits after steps in which a node of the loss, so deep, fails so often in the backward pass."""
    torch.manual_seed(0)
    net, x, y = MODELS[kind]()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    px.distribute(net, optimizer)
    for at in range(STEPS):
        part = slice(16 * at, 16 * at + 16)
        failing = Failing(count if at == 1 else 0)
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x[part]), y[part]) / 2
        node = loss.grad_fn
        for _ in range(depth):
            assert node is not None
            node = node.next_functions[0][0]
        assert node is not None
        node.register_prehook(failing)
        loss.backward()
        optimizer.step()
        assert not failing.left
    return digest(net), float(torch.rand(()))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", MODELS)
def test_a_backward_pass_goes_on_from_where_the_loss_ran_out_of_memory(
    kind: str, depth: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_point, "LEAST_BYTES", 0)
    assert train_with_failing_node(kind, depth, count) == train_with_failing_node(kind, depth, 0)


def test_a_loss_of_several_terms_keeps_the_error(trap: LossTrap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_point, "LEAST_BYTES", 0)
    net = guarded(trap)
    trap.left = 0
    outputs = net(torch.randn(4, 8))
    loss = F.cross_entropy(outputs, torch.zeros(4, dtype=torch.int64))
    assert loss.grad_fn is not None
    loss.grad_fn.next_functions[0][0].register_prehook(Failing(1))
    with pytest.raises(RuntimeError, match="can't allocate memory") as error:
        (loss + outputs.square().mean()).backward()
    assert any("before gradients had arrived" in note for note in error.value.__notes__)


@pytest.mark.parametrize("failures", [(0, 1, 0), (0, 2, 0), (2, 1, 1), (1, 1, 1)])
@pytest.mark.parametrize("kind", MODELS)
def test_a_loss_that_runs_out_of_memory_changes_no_bit(kind: str, failures: tuple[int, ...], trap: LossTrap) -> None:
    assert train(kind, trap, failures) == train(kind, trap)


def test_events_name_the_loss(trap: LossTrap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_EVENTS_FILE", str(tmp_path / "events"))
    train("text", trap, (0, 2, 0))
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    assert [(event["phase"], event["remedy"]) for event in events] == [("loss", "free_caches"), ("loss", "recompute")]


def test_a_loss_that_never_fits_is_the_error(trap: LossTrap) -> None:
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        train("text", trap, (0, 100, 0))
    assert trap.left == 97  # as it is, with caches freed, without the activations of the model


def test_with_the_word_off_the_loss_is_computed_once(trap: LossTrap) -> None:
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        train("rows", trap, (0, 1, 0), word="raise")


def guarded(trap: LossTrap, width: int = 8) -> nn.Module:
    net = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 4))
    px.distribute(net)
    trap.left = 2
    return net


def test_a_loss_that_uses_the_inputs_gradients_is_not_computed_again(trap: LossTrap) -> None:
    net = guarded(trap)
    with pytest.raises(RuntimeError, match="can't allocate memory") as error:
        F.cross_entropy(net(torch.randn(4, 8, requires_grad=True)), torch.zeros(4, dtype=torch.int64))
    assert any("inputs of the model have gradients" in note for note in error.value.__notes__)


@pytest.mark.parametrize("options", [{"retain_graph": True}, {"create_graph": True}])
def test_a_backward_pass_that_cannot_be_repeated_says_that_the_graph_is_gone(
    options: dict[str, bool], trap: LossTrap
) -> None:
    net = guarded(trap)
    loss = F.cross_entropy(net(torch.randn(4, 8)), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ReleasedGraphError, match="memory had run out"):
        loss.backward(**options)


def test_a_penalty_of_parameters_beside_the_loss_is_an_error_in_backward(trap: LossTrap) -> None:
    net = guarded(trap)
    loss = F.cross_entropy(net(torch.randn(4, 8)), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ReleasedGraphError) as error:
        (loss + sum((param.square().sum() for param in net.parameters()), torch.zeros(()))).backward()
    assert any("beside its outputs" in note for note in error.value.__notes__)


def test_the_function_stays_what_libraries_know_and_compile(trap: LossTrap) -> None:
    before = F.cross_entropy
    net = guarded(trap)
    assert model_record(net).memory_guard is not None
    trap.left = 0
    assert pickle.loads(pickle.dumps(F.cross_entropy)) is before
    x, y = torch.randn(4, 8, requires_grad=True), torch.zeros(4, dtype=torch.int64)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x, y)

    assert torch.equal(torch.compile(loss_of, backend="aot_eager", fullgraph=True)(x, y), loss_of(x, y))
    assert torch.equal(torch.func.grad(loss_of)(x.detach(), y), torch.autograd.grad(loss_of(x, y), x)[0])
