"""Logical replicas: the trained weights have the same bits on any number of ranks."""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.data import Dataset, TensorDataset

import phalanx as px
from phalanx.errors import ConfigError, PlanError
from phalanx.parallel.step.gate import has_updated
from phalanx.strategy import DistributedStrategy
from ranks import run_ranks

pytestmark = pytest.mark.dist

REPLICAS = 4
STEPS = 8
SAMPLES, GLOBAL = 101, 24
"""The last global batch of an epoch has 5 samples: one replica gets 2."""


class Noisy(Dataset[Any]):
    """Samples with an augmentation that draws from torch's random numbers."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + 0.1 * torch.randn_like(self.x[index]), self.y[index]


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.embed, self.layers, self.head = nn.Embedding(20, 16), nn.TransformerEncoder(layer, 2), nn.Linear(16, 20)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x))).transpose(1, 2)


def images() -> tuple[nn.Module, Dataset[Any]]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(SAMPLES, 3, 6, 6, generator=generator), torch.randint(0, 4, (SAMPLES,), generator=generator)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8 * 16, 4)
    )
    return net, Noisy(x, y)


def text() -> tuple[nn.Module, Dataset[Any]]:
    x = torch.randint(0, 20, (SAMPLES, 6), generator=torch.Generator().manual_seed(0))
    return Transformer(), TensorDataset(x, x.roll(-1, 1))


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


class Remembering(nn.Module):
    """Assigns a buffer in every forward pass, which the loss depends on."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x)
        self.seen = 0.9 * self.seen + 0.1 * out.detach().mean(0)
        return out + self.seen


def remembering() -> tuple[nn.Module, Dataset[Any]]:
    net, data = images()
    return Remembering(net), data


CLIP = {"clip": True, "clip_configs": {"norm": 0.5}}
CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    "images": (images, sgd, {}),
    "text, clipped": (text, adamw, CLIP),
    "text, zero 1": (text, adamw, {"sharding": True, "sharding_configs": {"stage": 1}, **CLIP}),
    "images, zero 3": (images, sgd, {"sharding": True, "sharding_configs": {"stage": 3}, **CLIP}),
    "assigned buffers": (remembering, sgd, {}),
    "text, bfloat16, ema": (text, adamw, {"amp": True, "ema": True}),
    "images, lamb": (images, adamw, {"lamb": True}),
    "images, accumulated": (images, sgd, {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 3}}),
}


def digest(net: nn.Module) -> str:
    """Return the SHA-256 of a model's full weights and buffers."""
    state: Any = net.state_dict()
    if any(hasattr(value, "placements") for value in state.values()):
        state = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    summary = hashlib.sha256()
    for name, value in sorted(state.items()):
        summary.update(name.encode() + value.contiguous().numpy().tobytes())
    return summary.hexdigest() if state else ""


def train(net: nn.Module, optimizer: Any, loader: Any, steps: int) -> None:
    done = 0
    while done < steps:
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            done += has_updated(optimizer)
            if done == steps:
                return


def train_case(name: str, steps: int = STEPS) -> str:
    build, build_optimizer, settings = CASES[name]
    torch.manual_seed(1)
    net, data = build()
    strategy = DistributedStrategy(**settings)
    net, optimizer, loader = px.distribute(
        net, build_optimizer(net), data, global_batch=GLOBAL, strategy=strategy, replicas=REPLICAS, seed=5
    )
    train(net, optimizer, loader, steps)
    return digest(net)


def train_all() -> dict[str, str]:
    digests = {}
    for name in CASES:
        digests[name] = train_case(name)
        gc.collect()
    return digests


def test_weights_have_the_same_bits_on_any_number_of_ranks() -> None:
    by_ranks = {n: run_ranks(train_all, n)[0] for n in (1, 2, 3, 4)}
    assert by_ranks[2] == by_ranks[1]
    assert by_ranks[3] == by_ranks[1]
    assert by_ranks[4] == by_ranks[1]
    assert by_ranks[1]["text, zero 1"] == by_ranks[1]["text, clipped"]
    assert len(set(by_ranks[1].values())) == len(CASES) - 1


def train_weights_in_bfloat16() -> str:
    torch.manual_seed(1)
    net, data = text()
    net, optimizer, loader = px.distribute(net.bfloat16(), sgd(net), data, global_batch=GLOBAL, replicas=3, seed=5)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(net(x).float(), y).backward()
        optimizer.step()
    return digest(net.float())


def test_ranks_with_one_and_with_two_replicas_add_up_gradients_in_bfloat16() -> None:
    by_ranks = {n: run_ranks(train_weights_in_bfloat16, n) for n in (1, 2, 3)}
    assert by_ranks[2] == by_ranks[1] * 2
    assert by_ranks[3] == by_ranks[1] * 3


def gradient_of_one_step(replicas: int | None) -> list[Tensor]:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x = torch.randn(10, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    net, optimizer, loader = px.distribute(
        net, sgd(net), TensorDataset(x), global_batch=10, replicas=replicas, shuffle=False
    )
    for (batch,) in loader:
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
    return [param.grad.clone() for param in net.parameters()]


def test_the_gradient_is_that_of_one_process() -> None:
    expected = run_ranks(partial(gradient_of_one_step, None), 1)[0]
    for ranks in (1, 2, 3):
        gradients = run_ranks(partial(gradient_of_one_step, 3), ranks)[0]
        for gradient, other in zip(gradients, expected, strict=True):
            assert (gradient - other).norm() <= 1e-12 * other.norm()


def train_step_and_model(folder: Path) -> tuple[str, str, list[float]]:
    torch.manual_seed(1)
    net, data = images()
    net, optimizer, loader = px.distribute(net, adamw(net), data, global_batch=GLOBAL, replicas=REPLICAS, seed=5)
    scheduler = px.follow_updates(torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5))
    step = px.train_step(net, nn.CrossEntropyLoss(), optimizer)
    for x, y in loader:
        step(x, y)
        scheduler.step()
    first = digest(net)
    del net, optimizer, loader, scheduler, step
    gc.collect()
    losses: list[float] = []

    class Losses(px.Callback):
        def on_step_end(self, run: Any) -> None:
            losses.append(run.global_loss())

    torch.manual_seed(2)
    net, data = text()
    model = px.Model(net, nn.CrossEntropyLoss(), adamw(net))
    model.train(2, px.data.ShardedLoader(data, global_batch=GLOBAL, seed=5), callbacks=[Losses()])
    return first, digest(net), losses


def test_steps_and_models_too(tmp_path: Path) -> None:
    run = partial(train_step_and_model, tmp_path)
    by_ranks = {n: run_ranks(run, n, env={"PHALANX_REPLICAS": str(REPLICAS)})[0] for n in (1, 3, 4)}
    for digests in by_ranks.values():
        assert digests[:2] == by_ranks[1][:2]
        assert digests[2] == pytest.approx(by_ranks[1][2], rel=1e-6)
    assert len(by_ranks[1][2]) == 2 * 5  # updates, not batches


def train_from(folder: Path, steps: int, *, resumes: bool) -> str:
    torch.manual_seed(1)
    net, data = images()
    strategy = DistributedStrategy(sharding=True)
    net, optimizer, loader = px.distribute(
        net, adamw(net), data, global_batch=GLOBAL, strategy=strategy, replicas=REPLICAS, seed=5
    )
    if resumes:
        px.load(folder, net, optimizer, loader)
    done = 0
    while done < steps:
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            done += has_updated(optimizer)
            if done == steps:
                px.save(folder, net, optimizer, loader)
                break
    return digest(net)


def test_a_resumed_run_may_have_another_number_of_ranks(tmp_path: Path) -> None:
    undisturbed = run_ranks(partial(train_from, tmp_path / "undisturbed", 12, resumes=False), 4)[0]
    for ranks, steps in ((2, 3), (3, 4), (1, 5)):  # an epoch has 5 steps
        last = run_ranks(partial(train_from, tmp_path / "disturbed", steps, resumes=ranks != 2), ranks)[0]
    assert last == undisturbed


class Slow(nn.Module):
    """Waits on one rank in every forward pass."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return self.net(x)


def train_on_unequal_ranks(replicas: int, *, zero: int, workers: int) -> tuple[str, list[int]]:
    torch.manual_seed(1)
    net, data = images()
    settings: dict[str, Any] = {"sharding": True, "sharding_configs": {"stage": zero}} if zero else {}
    strategy = DistributedStrategy(balance="replicas", **settings)
    slow = Slow(net)
    loading: dict[str, Any] = {"persistent_workers": True} if workers else {}
    slow, optimizer, loader = px.distribute(
        slow,
        sgd(slow),
        data,
        global_batch=GLOBAL,
        strategy=strategy,
        replicas=replicas,
        seed=5,
        num_workers=workers,
        **loading,
    )
    context = px.current()
    assert context.replicas is not None
    slow.seconds = 0.03 if context.rank == 1 else 0.002
    train(slow, optimizer, loader, 30)
    return digest(slow), [len(local) for local in context.replicas.assignment]


@pytest.mark.parametrize(("zero", "workers"), [(0, 0), (3, 0), (0, 1)])
def test_replicas_move_to_faster_ranks_and_no_bit_changes(zero: int, workers: int) -> None:
    work = partial(train_on_unequal_ranks, 8, zero=zero, workers=workers)
    (weights, sizes), _ = run_ranks(work, 2)
    assert sizes[0] > sizes[1] >= 1
    assert weights == run_ranks(work, 1)[0][0]


def error_of(act: Callable[[], object]) -> str:
    try:
        act()
    except (ConfigError, PlanError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def loop_that_cannot_be_exact(name: str) -> str:
    x, y = torch.randn(24, 5), torch.randint(0, 3, (24,))

    def loop(body: Callable[..., None], **settings: Any) -> str:
        net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        optimizer = sgd(net)

        def act() -> None:
            strategy = DistributedStrategy(**settings)
            trained, _, loader = px.distribute(
                net, optimizer, TensorDataset(x, y), global_batch=12, strategy=strategy, replicas=4
            )
            body(trained, optimizer, loader)

        return error_of(act)

    def two_passes(net: nn.Module, optimizer: Any, loader: Any) -> None:
        for x, y in loader:
            F.cross_entropy(net(x), y).backward()
            net(x).square().mean().backward()
            optimizer.step()

    def train_scheduled(net: nn.Module, optimizer: Any, loader: Any, every: int) -> None:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, every, 0.5)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            scheduler.step()

    def scheduled(net: nn.Module, optimizer: Any, loader: Any) -> None:
        train_scheduled(net, optimizer, loader, every=1)

    def own_tensors(net: nn.Module, optimizer: Any, loader: Any) -> None:
        F.cross_entropy(net(x[:3]), y[:3]).backward()

    def kept_gradients(net: nn.Module, optimizer: Any, loader: Any) -> None:
        for x, y in loader:
            F.cross_entropy(net(x), y).backward()
            optimizer.step()

    def later_scheduled(net: nn.Module, optimizer: Any, loader: Any) -> None:
        train_scheduled(net, optimizer, loader, every=12)  # the rate itself does not change within a round

    def decayed(net: nn.Module, optimizer: Any, loader: Any) -> None:
        for number, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            optimizer.param_groups[0]["weight_decay"] = 0.1 * number
            F.cross_entropy(net(x), y).backward()
            optimizer.step()

    def step_first(net: nn.Module, optimizer: Any, loader: Any) -> None:
        for x, y in loader:
            optimizer.step()
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()

    def every_other(net: nn.Module, optimizer: Any, loader: Any) -> None:
        for number, (x, y) in enumerate(loader):
            if number % 2 == 0:
                optimizer.zero_grad()
                F.cross_entropy(net(x), y).backward()
                optimizer.step()

    def after_step(net: nn.Module, optimizer: Any, loader: Any) -> None:
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            F.cross_entropy(net(x), y).backward()

    def peeked(net: nn.Module, optimizer: Any, loader: Any) -> None:
        for x, _ in loader:
            with torch.no_grad():
                net(x)

    def own_optimizer(net: nn.Module, optimizer: Any, loader: Any) -> None:
        other = sgd(net)
        for x, y in loader:
            F.cross_entropy(net(x), y).backward()
            other.step()

    def saved(net: nn.Module, optimizer: Any, loader: Any) -> None:
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            px.save("not written", net, optimizer, loader)

    def weighted(net: nn.Module, optimizer: Any, loader: Any) -> None:
        step = px.train_step(net, nn.CrossEntropyLoss(ignore_index=0), optimizer)
        for x, y in loader:
            step(x, torch.zeros_like(y))

    bodies = (
        *(own_tensors, two_passes, scheduled, kept_gradients, later_scheduled, decayed, step_first),
        *(every_other, after_step, own_optimizer, saved, weighted, peeked),
    )
    return loop(next(body for body in bodies if body.__name__ == name))


def distribute_with(settings: dict[str, Any]) -> str:
    net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    strategy = DistributedStrategy(**settings)
    return error_of(
        lambda: px.distribute(
            net, sgd(net), TensorDataset(torch.randn(24, 5)), batch_size=3, strategy=strategy, replicas=4
        )
    )


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("two_passes", "Call backward once for each batch"),
        ("scheduled", "px.follow_updates"),
        ("own_tensors", "before a loader gave out a batch"),
        ("kept_gradients", "zero_grad"),
        ("weighted", "a weight of 0"),
        ("later_scheduled", "px.follow_updates"),
        ("decayed", "another setting"),
        ("step_first", "before the backward pass"),
        ("every_other", "continues with the next global batch"),
        ("after_step", "after an optimizer's step"),
        ("peeked", "without a backward pass changed buffer"),
        ("own_optimizer", "not given to px.distribute"),
        ("saved", "between two logical replicas"),
    ],
)
def test_what_cannot_be_exact_is_an_error_before_the_first_update(name: str, part: str) -> None:
    for error in run_ranks(loop_that_cannot_be_exact, 2, name):
        assert part in error


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"sync_batch_norm": True}, "sync_batch_norm on fewer ranks than replicas"),
        ({"localsgd": True}, "'average'"),
        ({"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}, "sharding": True}, "gradient_merge and sh"),
        ({"fp16_allreduce": True}, "round by rank"),
        ({"parameter_broadcast": False}, "parameter_broadcast=False"),
        ({"sync_buffers": False}, "sync_buffers=False"),
    ],
)
def test_settings_that_cannot_be_exact_are_an_error(settings: dict[str, Any], part: str) -> None:
    for error in run_ranks(distribute_with, 2, settings):
        assert part in error


def too_many_ranks() -> str:
    net = nn.Linear(2, 2)
    return error_of(lambda: px.distribute(net, sgd(net), TensorDataset(torch.randn(8, 2)), batch_size=2, replicas=2))


def test_more_ranks_than_replicas_are_an_error() -> None:
    for outcome in run_ranks(too_many_ranks, 3):
        assert "2 logical replicas were asked for and 3 ranks" in outcome


def another_model(replicas: int | None) -> str:
    data = TensorDataset(torch.randn(24, 2))
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    px.distribute(first, sgd(first), data, batch_size=3, replicas=4)
    plan = px.Plan(mesh=first_plan(first).mesh, step=first_plan(first).step.model_copy(update={"replicas": replicas}))
    return error_of(lambda: px.apply(plan, second))


def first_plan(model: nn.Module) -> Any:
    from phalanx.parallel.session import applied_to

    applied = applied_to(model)
    assert applied is not None
    return applied.plan


def test_models_of_one_process_have_the_same_replicas() -> None:
    for ranks in (1, 2):
        assert "no logical replicas, the Plan of the model before 4" in run_ranks(another_model, ranks, None)[0]
        assert run_ranks(another_model, ranks, 4)[0] == "no error"


class Blocks(nn.Module):
    """What tensor parallel shards: a vocabulary, two linear layers with dropout between, and what it leaves whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 16)
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(F.gelu(self.first(self.embed(x))), 0.2, self.training)
        return self.head(F.dropout(self.norm(self.second(hidden)), 0.1, self.training)).transpose(1, 2)


def train_sharded(settings: dict[str, Any]) -> tuple[int, str]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 24, (SAMPLES, 5), generator=generator)
    torch.manual_seed(1)
    net = Blocks()
    px.shard(net, {"embed": "vocab", "first": "column", "second": "row"})
    strategy = DistributedStrategy(tensor_parallel=True, hybrid_configs={"mp_degree": 2}, **settings)
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    net, optimizer, loader = px.distribute(
        net, optimizer, TensorDataset(x, x % 8), global_batch=GLOBAL, strategy=strategy, replicas=REPLICAS, seed=5
    )
    train(net, optimizer, loader, STEPS)
    return px.init().rank % 2, digest(net)


@pytest.mark.parametrize("settings", [{}, {"clip": True, "clip_configs": {"norm": 0.5}}, {"amp": True}])
def test_a_tensor_parallel_group_counts_as_one_rank(settings: dict[str, Any]) -> None:
    few, many = (set(run_ranks(train_sharded, ranks, settings)) for ranks in (2, 4))
    assert len(few) == 2
    assert few == many
