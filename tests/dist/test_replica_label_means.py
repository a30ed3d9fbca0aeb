"""Losses that are means over labels that count are exact over logical replicas, which count differently many."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import phalanx as px
from dist.test_logical_replicas import Transformer, adamw, digest, error_of, sgd
from fake_launcher import FakeLauncher
from phalanx.strategy import DistributedStrategy
from ranks import run_ranks

pytestmark = pytest.mark.dist

GLOBAL, ROUNDS, IGNORED = 12, 4, 0
SAMPLES = (ROUNDS - 1) * GLOBAL + 7
WEIGHTS = torch.linspace(0.5, 2.0, 20)


def tokens() -> tuple[Tensor, Tensor]:
    """Return sequences of different lengths, padded with what does not count."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(1, 20, (SAMPLES, 6), generator=generator)
    lengths = torch.randint(1, 7, (SAMPLES, 1), generator=generator)
    y = torch.where(torch.arange(6) < lengths, x.roll(-1, 1), IGNORED)
    y[:3] = IGNORED  # a replica of the first global batch has no label
    return x, y


def cut_to_longest(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    x, y = (torch.stack(column) for column in zip(*samples, strict=True))
    length = max(1, int((y != IGNORED).sum(1).max()))
    return x[:, :length].contiguous(), y[:, :length].contiguous()


def by_hand(net: nn.Module, optimizer: Any, loader: Any, k: int = 1) -> None:
    for _ in range(2):
        for number, (x, y) in enumerate(loader):
            total = F.cross_entropy(net(x), y, reduction="sum", ignore_index=IGNORED)
            (px.weighted_mean(total, (y != IGNORED).sum()) / k).backward()
            if (number + 1) % k == 0:
                optimizer.step()
                optimizer.zero_grad()


def after_a_break(net: nn.Module, optimizer: Any, loader: Any) -> None:
    """Leave a pass after one batch, which is no whole global batch where ranks hold several replicas."""
    for x, y in loader:
        total = F.cross_entropy(net(x), y, reduction="sum", ignore_index=IGNORED)
        px.weighted_mean(total, (y != IGNORED).sum()).backward()
        break
    optimizer.zero_grad()
    by_hand(net, optimizer, loader)


def by_step(loss: Callable[..., Any], net: nn.Module, optimizer: Any, loader: Any) -> None:
    step = px.train_step(net, loss, optimizer)
    for _ in range(2):
        for x, y in loader:
            step(x, y)


ignoring = nn.CrossEntropyLoss(ignore_index=IGNORED)
weighing = nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=IGNORED)
Loop = Callable[[nn.Module, Any, Any], None]
CASES: dict[str, tuple[Callable[..., Any], Loop, dict[str, Any]]] = {
    "by hand": (sgd, by_hand, {}),
    "accumulated": (adamw, partial(by_hand, k=2), {}),
    "step": (adamw, partial(by_step, ignoring), {"clip": True, "clip_configs": {"norm": 0.5}}),
    "step, class weights, zero 2": (
        *(sgd, partial(by_step, weighing)),
        {"sharding": True, "sharding_configs": {"stage": 2}},
    ),
}


def train_all() -> dict[str, str]:
    digests = {}
    for name, (build_optimizer, loop, settings) in CASES.items():
        torch.manual_seed(1)
        net = Transformer()
        strategy, data = DistributedStrategy(**settings), TensorDataset(*tokens())
        net, optimizer, loader = px.distribute(
            net, build_optimizer(net), data, global_batch=GLOBAL, strategy=strategy, replicas=4, seed=5
        )
        loop(net, optimizer, loader)
        digests[name] = digest(net)
        del net, optimizer, loader
        gc.collect()
    return digests


def train_on_cut_batches(folder: Path | None = None, stop: int = 0) -> str:
    """Train on batches whose sequences are as long as the longest one of a replica; resume, stop and save if asked."""
    torch.manual_seed(1)
    net = Transformer()
    net, optimizer, _ = px.distribute(net, adamw(net), replicas=4)
    loader = px.data.ShardedLoader(TensorDataset(*tokens()), global_batch=GLOBAL, seed=5, collate_fn=cut_to_longest)
    if folder is None:
        by_step(ignoring, net, optimizer, loader)
        return digest(net)
    step, checkpointer = px.train_step(net, ignoring, optimizer), px.Checkpointer(folder, net, optimizer, loader)
    checkpointer.resume()
    while checkpointer.steps < stop:
        for x, y in loader:
            step(x, y)
            checkpointer.step()
            if checkpointer.steps == stop:
                checkpointer.save()
                break
    checkpointer.close()
    return digest(net)


def test_replicas_with_sequences_of_different_lengths_have_the_same_bits_too() -> None:
    by_ranks = {n: run_ranks(train_on_cut_batches, n) for n in (1, 2, 4)}
    assert by_ranks[2] == by_ranks[1] * 2
    assert by_ranks[4] == by_ranks[1] * 4


def test_they_go_on_from_a_checkpoint_with_the_same_bits(tmp_path: Path) -> None:
    undisturbed = run_ranks(train_on_cut_batches, 1, tmp_path / "undisturbed", 2 * ROUNDS)
    run_ranks(train_on_cut_batches, 2, tmp_path / "disturbed", ROUNDS + 2)
    assert run_ranks(train_on_cut_batches, 1, tmp_path / "disturbed", 2 * ROUNDS) == undisturbed


def train_where_all_count() -> str:
    torch.manual_seed(1)
    net, x = Transformer(), tokens()[0]
    net, optimizer, loader = px.distribute(
        net, adamw(net), TensorDataset(x, x.roll(-1, 1)), global_batch=GLOBAL, seed=5
    )
    by_step(nn.CrossEntropyLoss(), net, optimizer, loader)
    return digest(net)


def test_ranks_that_may_leave_and_join_have_the_same_bits_where_all_labels_count() -> None:
    env = {"PHALANX_REPLICAS": "4"}
    (expected,) = run_ranks(train_where_all_count, 1, env=env)
    assert list(FakeLauncher(train_where_all_count, members=2, env=env).run().values()) == [expected] * 2


def test_weights_have_the_same_bits_on_any_number_of_ranks() -> None:
    by_ranks = {n: run_ranks(train_all, n)[0] for n in (1, 2, 3, 4)}
    for digests in by_ranks.values():
        assert digests == by_ranks[1]


def small() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20)).double()


class Transposed(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).transpose(1, 2)


def off_one_process(loss: nn.CrossEntropyLoss, loop: Loop) -> float:
    net = Transposed(small())
    plain, (x, y) = copy.deepcopy(net), tokens()
    plain_optimizer, optimizer = sgd(plain), sgd(net)
    net, optimizer, loader = px.distribute(
        net, optimizer, TensorDataset(x, y), global_batch=GLOBAL, replicas=3, shuffle=False
    )
    loop(net, optimizer, loader)
    for _ in range(2):
        for a, b in zip(x.split(GLOBAL), y.split(GLOBAL), strict=True):
            plain_optimizer.zero_grad()
            loss(plain(a), b).backward()
            plain_optimizer.step()
    pairs = zip(net.parameters(), plain.parameters(), strict=True)
    return max(((p - q).norm() / q.norm()).item() for p, q in pairs)


def off_in_each_way() -> list[float]:
    double = nn.CrossEntropyLoss(weight=WEIGHTS.double(), ignore_index=IGNORED)
    offs = []
    for loss, loop in ((ignoring, by_hand), (ignoring, partial(by_step, ignoring)), (double, partial(by_step, double))):
        offs.append(off_one_process(loss, loop))
        gc.collect()
    return offs


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_updates_are_those_of_one_process(ranks: int) -> None:
    for offs in run_ranks(off_in_each_way, ranks):
        assert max(offs) < 1e-12


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_global_batch_that_the_loop_leaves_adds_no_weight_to_the_next(ranks: int) -> None:
    for off in run_ranks(off_one_process, ranks, ignoring, after_a_break):
        assert off < 1e-12


def refusal(name: str) -> str:
    net, (x, y) = Transposed(small()), tokens()
    settings: dict[str, Any] = {}
    if name == "merged":
        settings = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
    optimizer = sgd(net)
    net, optimizer, loader = px.distribute(
        net,
        optimizer,
        TensorDataset(x, torch.zeros_like(y) if name == "no_label" else y),
        global_batch=GLOBAL,
        strategy=DistributedStrategy(**settings),
        replicas=4,
    )

    def mean(x: Tensor, y: Tensor) -> Tensor:
        total = F.cross_entropy(net(x), y, reduction="sum", ignore_index=IGNORED)
        return px.weighted_mean(total, (y != IGNORED).sum())

    losses: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "other_terms": lambda x, y: mean(x, y) + 0.1 * net(x).square().mean(),
        "squared": lambda x, y: mean(x, y) ** 2,
        "inverse": lambda x, y: 1.0 / mean(x, y),
        "twice": lambda x, y: mean(x, y) + mean(x, y),
        "merged": mean,
        "no_label": mean,
    }

    def loop() -> None:
        for x, y in loader:
            optimizer.zero_grad()
            losses[name](x, y).backward()
            optimizer.step()

    return error_of(loop)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("other_terms", "a loss has other terms beside px.weighted_mean"),
        ("squared", "is no multiple of it"),
        ("inverse", "is no multiple of it"),
        ("twice", "a second mean over labels"),
        ("merged", "under gradient_merge"),
        ("no_label", "a weight of 0 in all logical replicas"),
    ],
)
def test_a_mean_that_cannot_be_exact_is_an_error(name: str, part: str) -> None:
    for ranks in (2, 4):
        for error in run_ranks(refusal, ranks, name):
            assert part in error
