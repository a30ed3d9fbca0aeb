"""A pass that runs out of memory is repeated in the same call, with the same bits, or its error says why not."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import random
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as px
from memory_traps import MESSAGE, MODELS, Trap, digest, limit_memory
from phalanx.cluster.proc import process_memory
from phalanx.parallel.memory.blocks import find_blocks
from phalanx.parallel.session import model_record

STEPS = 3


@pytest.fixture(autouse=True)
def _few_objects() -> Iterator[None]:
    """Let each collection look at what the test made only."""
    gc.freeze()
    limit_memory()
    yield
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    Trap.set("", 0)
    gc.unfreeze()


def train(
    kind: str, phase: str = "", number: int = 0, *, how: str = "loop", word: str = "recompute"
) -> tuple[str, float]:
    """Return the bits after some steps, the second of which runs out of memory, and a random number drawn then."""
    torch.manual_seed(0)
    net, x, y = MODELS[kind]()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    px.distribute(net, optimizer, strategy=px.DistributedStrategy(out_of_memory=word))
    step = px.train_step(net, F.cross_entropy, optimizer) if how == "train_step" else None
    for at in range(STEPS):
        part = slice(16 * at, 16 * at + 16)
        Trap.set(phase if at == 1 else "", number)
        if step is not None:
            step(x[part], y[part])
        else:
            optimizer.zero_grad()
            F.cross_entropy(net(x[part]), y[part]).backward()
            optimizer.step()
        if at == 1:
            assert not Trap.phase  # it did run out of memory
    return digest(net), float(torch.rand(()))


TRAPS = {"images": 6, "rows": 4, "text": 6}


@pytest.mark.parametrize("how", ["loop", "train_step"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("kind", MODELS)
def test_bits_are_those_of_enough_memory_wherever_it_runs_out(kind: str, phase: str, how: str) -> None:
    whole = train(kind, how=how)
    for number in range(1, TRAPS[kind] + 1):
        assert train(kind, phase, number, how=how) == whole, number


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("kind", MODELS)
def test_every_remedy_in_turn_keeps_the_bits(kind: str, phase: str, caplog: pytest.LogCaptureFixture) -> None:
    whole = train(kind)
    torch.manual_seed(0)
    net, x, y = MODELS[kind]()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    px.distribute(net, optimizer)
    guard = model_record(net).memory_guard
    assert guard is not None
    applied = 0
    for at in range(STEPS):
        part = slice(16 * at, 16 * at + 16)
        while guard.remedies.remain() and applied <= at:
            guard.remedies.apply_next()
            applied += 1
        Trap.set(phase if guard.remedies.remain() else "", 2)
        optimizer.zero_grad()
        F.cross_entropy(net(x[part]), y[part]).backward()
        optimizer.step()
    assert not guard.remedies.remain()
    assert (digest(net), float(torch.rand(()))) == whole
    assert "rank 0 ran out of memory" in caplog.text


def test_without_a_limit_on_the_host_nothing_is_noted() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        train("rows", "forward", 2)


def test_the_word_leaves_the_error_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        train("rows", "forward", 2, word="raise")
    assert not Trap.phase


def test_a_log_line_and_an_event_tell_what_was_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PHALANX_EVENTS_FILE", str(tmp_path / "events"))
    torch.manual_seed(0)
    net, x, y = MODELS["text"]()
    px.distribute(net)
    for phase in ("forward", "backward"):
        Trap.set(phase, 3)
        F.cross_entropy(net(x[:16]), y[:16]).backward()
    first, second = (json.loads(line) for line in (tmp_path / "events").read_text().splitlines())
    assert (first["kind"], first["phase"], first["remedy"]) == ("out_of_memory", "forward", "free_caches")
    assert (second["phase"], second["remedy"], second["requested"]) == ("backward", "recompute", "400 bytes")
    assert second["free_bytes"] > 0
    assert second["lost_s"] > 0
    assert "step" not in first
    assert 'strategy.recompute_configs = {"checkpoints": ["blocks.*"]}' in caplog.text


class Around(nn.Module):
    """A net in which `changed` is done to each forward pass."""

    def __init__(self, changed: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.body = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(8, 8), nn.Tanh(), Trap())])
        self.register_buffer("seen", torch.zeros(8))
        self._changed = changed

    def forward(self, x: Tensor) -> Any:
        return self._changed(self, x)


def remember(net: Any, x: Tensor) -> Tensor:
    net.seen = 0.9 * net.seen + x.mean(0)
    return net.body(x + net.seen)  # type: ignore[no-any-return]


def count_in_place(net: Any, x: Tensor) -> Tensor:
    net.seen.mul_(0.9).add_(x.mean(0))
    return net.body(x + net.seen)  # type: ignore[no-any-return]


def skip_by_python(net: Any, x: Tensor) -> Tensor:
    return net.body(x) if random.random() < 0.5 else net.body(-x)


def two_outputs(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = net.body[:6](x)
    return hidden, net.body[6:](hidden)


def total(output: Any) -> Tensor:
    return sum(((index + 1) * part.square().mean() for index, part in enumerate(output)), torch.zeros(()))


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("changed", [remember, skip_by_python, two_outputs, count_in_place])
def test_buffers_outputs_and_random_numbers_of_python_come_back(changed: Any, phase: str) -> None:
    def gradients(trap: str) -> list[Tensor]:
        torch.manual_seed(0)
        net = Around(changed)
        px.distribute(net)
        random.seed(0)
        for _ in range(3):
            total(net(torch.randn(4, 8))).backward()
        Trap.set(trap, 3)
        total(net(torch.randn(4, 8))).backward()
        return [param.grad for param in net.parameters() if param.grad is not None] + [net.seen]

    for one, other in zip(gradients(""), gradients(phase), strict=True):
        assert torch.equal(one, other)


class Drawing(nn.Module):
    """A block whose output depends on a buffer that it changes, and on random numbers of Python and NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), Trap()])
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.mul_(0.9).add_(x.detach().mean(0))
        for layer in self.layers:
            x = layer(x + self.seen)
        return torch.tanh(x) * random.random() + x * float(np.random.random())


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_recomputed_block_reads_the_buffers_and_draws_the_numbers_of_its_first_pass(phase: str) -> None:
    def gradients(trap: str) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(*[Drawing() for _ in range(4)])
        px.distribute(net)
        random.seed(0)  # the first job of a process draws some of its own
        np.random.seed(0)
        for _ in range(4):
            Trap.set(trap, 2)
            net(torch.randn(4, 8)).mean().backward()
        guard = model_record(net).memory_guard
        assert guard is not None
        assert not trap or not guard.remedies.remain()
        return [param.grad for param in net.parameters() if param.grad is not None] + list(net.buffers())

    for one, other in zip(gradients(""), gradients(phase), strict=True):
        assert torch.equal(one, other)


def before_the_first_output(net: Any, x: Tensor) -> Tensor:
    net._changed = two_outputs
    Trap.left = 2
    return total(net(x))


def penalised(net: Any, x: Tensor) -> Tensor:
    return net(x).mean() + net.body[0].weight.square().sum()  # type: ignore[no-any-return]


class Weighted(nn.Module):
    """A term of the loss that was computed before the model, with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))


def with_an_older_term(net: Any, x: Tensor) -> Tensor:
    older = Weighted().weight.square()
    return older + net(x).mean()  # type: ignore[no-any-return]


def inner_loss(net: Any, x: Tensor) -> Tensor:
    features: list[Tensor] = []
    handle = net.body[3].register_forward_hook(lambda _net, _inputs, output: features.append(output))
    out = net(x)
    handle.remove()
    return out.mean() + features[0].mean()  # type: ignore[no-any-return]


def with_input_gradients(net: Any, x: Tensor) -> Tensor:
    return net(x.requires_grad_()).mean()  # type: ignore[no-any-return]


def with_changed_input(net: Any, x: Tensor) -> Tensor:
    loss = net(x).mean()
    x.zero_()
    return loss  # type: ignore[no-any-return]


def with_a_later_buffer(net: Any, x: Tensor) -> Tensor:
    net(x)
    net.register_buffer("later", torch.zeros(8))
    return net(x).mean()  # type: ignore[no-any-return]


def enqueue(net: Any, x: Tensor) -> Tensor:
    net.queue[:8] = x.mean(0)
    return net.body(x)  # type: ignore[no-any-return]


def with_a_large_queue(net: Any, x: Tensor) -> Tensor:
    net.register_buffer("queue", torch.zeros(1 << 17))
    net._changed = enqueue
    return net(x).mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("loss_of", "why"),
    [
        (before_the_first_output, "before gradients had arrived at all outputs"),
        (penalised, "beside its outputs"),
        (with_an_older_term, "beside its outputs"),
        (inner_loss, "beside its outputs"),
        (with_input_gradients, "inputs of the model have gradients"),
        (with_changed_input, "an input was changed in place"),
        (with_a_later_buffer, "buffer 'later' of Around"),
        (with_a_large_queue, "buffer 'queue' of Around"),
    ],
)
def test_what_cannot_be_repeated_exactly_raises_the_error_with_the_reason(loss_of: Any, why: str) -> None:
    net = Around(lambda net, x: net.body(x))
    px.distribute(net)
    Trap.set("backward", 3)
    with pytest.raises(RuntimeError, match="can't allocate memory") as error:
        loss_of(net, torch.randn(4, 8)).backward()
    assert any(why in note for note in error.value.__notes__)


def test_a_forward_pass_that_computes_something_else_the_second_time_is_an_error() -> None:
    calls = []

    def counts(net: Any, x: Tensor) -> Tensor:
        calls.append(x)
        return net.body(x) * len(calls)  # type: ignore[no-any-return]

    net = Around(counts)
    px.distribute(net)
    Trap.set("backward", 3)
    output = net(torch.randn(4, 8))
    with pytest.raises(RuntimeError, match="can't allocate memory") as error:
        output.mean().backward()
    assert any("other values the second time" in note for note in error.value.__notes__)


def test_memory_that_never_suffices_raises_after_the_last_remedy() -> None:
    class Greedy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.tries = nn.Linear(8, 8), 0

        def forward(self, x: Tensor) -> Tensor:
            self.tries += 1
            raise RuntimeError(MESSAGE)

    net = Greedy()
    px.distribute(net)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        net(torch.randn(4, 8))
    assert net.tries == 2  # there is nothing to recompute, so caches are all that could be freed


@pytest.mark.parametrize(("free", "told"), [(32 << 20, True), (256 << 20, False)])
def test_a_kernel_that_could_not_be_generated_is_not_tried_again(free: int, told: bool) -> None:
    class Kernel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.tries = nn.Linear(8, 8), 0

        def forward(self, x: Tensor) -> Tensor:
            self.tries += 1
            raise RuntimeError("could not create a primitive")

    net = Kernel()
    px.distribute(net)
    x = torch.randn(4, 8)
    resource.setrlimit(resource.RLIMIT_AS, (process_memory().address_space + free, resource.RLIM_INFINITY))
    with pytest.raises(RuntimeError, match="could not create a primitive") as error:
        net(x)
    assert net.tries == 1
    assert any("a thread in which that failed" in note for note in getattr(error.value, "__notes__", ())) is told


def test_other_errors_pass_and_other_uses_of_gradients_work() -> None:
    net = Around(lambda net, x: net.body(x))
    px.distribute(net)
    x = torch.randn(4, 8, requires_grad=True)
    (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    slope.square().sum().backward()
    loss = net(x).sum()
    loss.backward(retain_graph=True)
    before = [param.grad.clone() for param in net.parameters()]
    loss.backward()
    assert all(not torch.equal(one, param.grad) for one, param in zip(before, net.parameters(), strict=True))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        net(torch.randn(4, 7))


def test_a_guarded_model_can_be_copied_pickled_compiled_and_freed() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    px.distribute(net)
    x = torch.randn(4, 8)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(other(x), net(x))
    assert torch.equal(torch.compile(net, backend="eager", fullgraph=True)(x), net(x))


def test_blocks_are_members_of_lists_at_any_depth_and_segments_of_plain_sequences() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False)
    names = [block.label for block in find_blocks(nn.ModuleDict({"embed": nn.Embedding(4, 8), "encoder": encoder}))]
    assert names == ["encoder.layers.0", "encoder.layers.1"]
    chain = nn.Sequential(*[part for _ in range(3) for part in (nn.Linear(8, 8), nn.ReLU(inplace=True))])
    assert [block.run for block in find_blocks(chain)] == [(0, 2), (2, 4), (4, 6)]
    assert find_blocks(nn.Linear(8, 8)) == []
