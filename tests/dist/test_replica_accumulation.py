"""A loop that accumulates gradients by itself has the same bits on any number of ranks, whatever replicas they hold."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import phalanx as px
from dist.test_logical_replicas import Noisy, Transformer, adamw, digest, error_of, sgd
from fake_launcher import FakeLauncher
from phalanx.strategy import DistributedStrategy
from ranks import run_ranks

pytestmark = pytest.mark.dist

REPLICAS, GLOBAL, ROUNDS, EPOCHS = 4, 12, 6, 2
SAMPLES = (ROUNDS - 1) * GLOBAL + 5
"""The last global batch of an epoch has 5 samples: one replica gets 2."""


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


def accumulate(net: nn.Module, optimizer: Any, loader: Any, k: int, *, clips: bool = False, quiet: bool = False) -> int:
    """Train as most loops with gradient accumulation do; return the updates."""
    updates = 0
    for _ in range(EPOCHS):
        for number, (x, y) in enumerate(loader):
            is_last = (number + 1) % k == 0 or number + 1 == len(loader)
            with px.no_sync(net) if quiet and not is_last else nullcontext():
                (F.cross_entropy(net(x), y) / k).backward()
            if is_last:
                if clips:
                    nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
                updates += px.has_updated(optimizer)
                optimizer.zero_grad()
    return updates


def accumulate_by_hand(net: nn.Module, optimizer: Any, loader: Any, k: int) -> int:
    """Do the same with an iterator, and gradients that are zeros before each update."""
    updates = 0
    for _ in range(EPOCHS):
        batches = iter(loader)
        for _ in range(len(loader) // k):
            optimizer.zero_grad(set_to_none=False)
            for _ in range(k):
                x, y = next(batches)
                (F.cross_entropy(net(x), y) / k).backward()
            px.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            updates += px.has_updated(optimizer)
        assert next(batches, None) is None
    return updates


Loop = Callable[..., int]
CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], Loop, int, dict[str, Any]]] = {
    "images": (images, sgd, accumulate, 2, {}),
    "images, no_sync": (images, sgd, partial(accumulate, quiet=True), 3, {}),
    "text, clipped": (text, adamw, partial(accumulate, clips=True), 3, {}),
    "text, no_sync, clipped": (text, adamw, partial(accumulate, clips=True, quiet=True), 2, {}),
    "text, by hand": (text, sgd, accumulate_by_hand, 2, {}),
    "text, zero 1": (text, sgd, accumulate_by_hand, 2, {"sharding": True, "sharding_configs": {"stage": 1}}),
    "images, zero 3": (images, adamw, accumulate, 3, {"sharding": True, "sharding_configs": {"stage": 3}}),
    "images, bfloat16": (images, adamw, accumulate, 2, {"amp": True}),
}

SHORT_LAST_UPDATES: dict[str, tuple[Callable[..., Any], Callable[..., Any], Loop, int, dict[str, Any]]] = {
    "images": (images, sgd, accumulate, 5, {}),
    "images, no_sync": (images, sgd, partial(accumulate, quiet=True), 4, {}),
    "text, no_sync, clipped, longer than an epoch": (text, adamw, partial(accumulate, clips=True, quiet=True), 7, {}),
}
"""Numbers of global batches that do not divide an epoch."""


def train_all(cases: str) -> dict[str, tuple[str, int]]:
    outcomes = {}
    for name, (build, build_optimizer, loop, k, settings) in globals()[cases].items():
        torch.manual_seed(1)
        net, data = build()
        strategy = DistributedStrategy(**settings)
        net, optimizer, loader = px.distribute(
            net, build_optimizer(net), data, global_batch=GLOBAL, strategy=strategy, replicas=REPLICAS, seed=5
        )
        updates = loop(net, optimizer, loader, k)
        assert updates == EPOCHS * -(-ROUNDS // k), name
        outcomes[name] = digest(net), updates
        del net, optimizer, loader
        gc.collect()
    return outcomes


def test_weights_have_the_same_bits_on_any_number_of_ranks() -> None:
    by_ranks = {n: run_ranks(train_all, n, "CASES")[0] for n in (1, 2, 3, 4)}
    assert by_ranks[2] == by_ranks[1]
    assert by_ranks[3] == by_ranks[1]
    assert by_ranks[4] == by_ranks[1]
    assert by_ranks[1]["text, zero 1"] == by_ranks[1]["text, by hand"]


def test_the_last_update_of_an_epoch_may_have_fewer_global_batches() -> None:
    by_ranks = {n: run_ranks(train_all, n, "SHORT_LAST_UPDATES")[0] for n in (1, 2, 3, 4)}
    assert by_ranks[2] == by_ranks[1]
    assert by_ranks[3] == by_ranks[1]
    assert by_ranks[4] == by_ranks[1]


def small() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, y = torch.randn(SAMPLES, 5, generator=generator), torch.randint(0, 3, (SAMPLES,), generator=generator)
    return net, x.double(), y


def off_one_process(k: int, *, quiet: bool, clips: bool) -> float:
    """Return how far the weights are off those of one process that accumulates over whole global batches."""
    net, x, y = small()
    plain = copy.deepcopy(net)
    plain_optimizer, optimizer = sgd(plain), sgd(net)
    net, optimizer, loader = px.distribute(
        net, optimizer, TensorDataset(x, y), global_batch=GLOBAL, replicas=3, shuffle=False
    )
    accumulate(net, optimizer, loader, k, clips=clips, quiet=quiet)
    for _ in range(EPOCHS):
        for number, (a, b) in enumerate(zip(x.split(GLOBAL), y.split(GLOBAL), strict=True)):
            (F.cross_entropy(plain(a), b) / k).backward()
            if (number + 1) % k == 0 or number + 1 == ROUNDS:
                if clips:
                    nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
                plain_optimizer.step()
                plain_optimizer.zero_grad()
    pairs = zip(net.parameters(), plain.parameters(), strict=True)
    return max(((p - q).norm() / q.norm()).item() for p, q in pairs)


def off_in_each_way() -> list[float]:
    offs = []
    for k, quiet, clips in ((2, False, False), (3, True, False), (2, True, True), (4, False, True), (5, True, False)):
        offs.append(off_one_process(k, quiet=quiet, clips=clips))
        gc.collect()
    return offs


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_updates_are_those_of_one_process(ranks: int) -> None:
    for offs in run_ranks(off_in_each_way, ranks):
        assert max(offs) < 1e-12


def refusal(name: str) -> str:
    net, x, y = small()
    strategy = DistributedStrategy(sharding=name == "sharded")
    optimizer = sgd(net)
    net, optimizer, loader = px.distribute(
        net, optimizer, TensorDataset(x, y), global_batch=GLOBAL, strategy=strategy, replicas=REPLICAS
    )

    def irregular() -> None:
        for number, (x, y) in enumerate(loader):
            F.cross_entropy(net(x), y).backward()
            if number in (1, 2):
                optimizer.step()
                optimizer.zero_grad()

    def left_out() -> None:
        for number, (x, y) in enumerate(loader):
            with px.no_sync(net) if number < 2 else nullcontext():
                if number:
                    F.cross_entropy(net(x), y).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()

    def twice() -> None:
        for x, y in loader:
            with px.no_sync(net):
                F.cross_entropy(net(x), y).backward()
                net(x).square().mean().backward()

    def late() -> None:
        for number, (x, y) in enumerate(loader):
            with px.no_sync(net) if number == 1 else nullcontext():
                F.cross_entropy(net(x), y).backward()

    def sharded() -> None:
        with px.no_sync(net):
            pass

    def over_epochs() -> None:
        for _ in range(2):
            for number, (x, y) in enumerate(loader):
                F.cross_entropy(net(x), y).backward()
                if number % 5 == 4:
                    optimizer.step()
                    optimizer.zero_grad()

    def saved() -> None:
        for number, (x, y) in enumerate(loader):
            F.cross_entropy(net(x), y).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
                px.save("not written", net, optimizer, loader)

    loops = irregular, left_out, twice, late, sharded, over_epochs, saved
    return error_of(next(loop for loop in loops if loop.__name__ == name))


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("irregular", "was called after 1 of this rank's batches, and of 3 of this update the first call came after 2"),
        ("left_out", "of this rank's batches"),
        ("twice", "Call backward once for each batch"),
        ("late", "px.no_sync was entered after other batches of the same update"),
        ("sharded", "Leave no_sync out"),
        ("over_epochs", "an epoch ended between two of them without a step"),
        ("saved", "between two logical replicas"),
    ],
)
def test_a_loop_that_cannot_be_followed_is_an_error(name: str, part: str) -> None:
    for error in run_ranks(refusal, 2, name):
        assert part in error


def test_an_update_of_two_epochs_is_an_error_on_as_many_ranks_as_replicas_too() -> None:
    assert "an epoch ended between two of them without a step" in run_ranks(refusal, 4, "over_epochs")[0]


def refusal_where_ranks_may_leave() -> str:
    net, x, y = small()
    optimizer = sgd(net)
    net, optimizer, loader = px.distribute(net, optimizer, TensorDataset(x, y), global_batch=GLOBAL)
    return error_of(lambda: accumulate(net, optimizer, loader, 2))


def test_accumulating_where_ranks_may_leave_and_join_is_an_error() -> None:
    job = FakeLauncher(refusal_where_ranks_may_leave, members=2, env={"PHALANX_REPLICAS": str(REPLICAS)})
    for error in job.run().values():
        assert "was called after 2 batches where ranks may leave and join" in error
