"""Elastic jobs that accumulate gradients over several batches: ranks come and go inside the group of one update."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import phalanx as px
from elastic_training import EPOCHS, GLOBAL, REPLICAS, SAMPLES, digest, job, strategy_of_job
from fake_launcher import FakeLauncher
from phalanx.parallel.step.gate import has_updated
from ranks import run_ranks

pytestmark = pytest.mark.dist

BATCHES = EPOCHS * SAMPLES // GLOBAL
MERGE = {"MERGE": "4"}
MIRROR = {**MERGE, "SHARDING": json.dumps({"mirror": 1})}


@pytest.fixture(scope="module")
def undisturbed() -> str:
    """The weights of an elastic job of one rank."""
    (value,) = job({}, members=1, env=MERGE).run().values()
    assert value[1] == BATCHES
    return str(value[0])


@pytest.mark.parametrize(("members", "env"), [(2, MERGE), (3, MERGE), (4, MERGE), (3, MIRROR)])
def test_without_a_loss_any_number_of_ranks_has_the_same_bits(
    undisturbed: str, members: int, env: dict[str, str]
) -> None:
    values = job({}, members=members, env=env).run()
    assert {value[:2] for value in values.values()} == {(undisturbed, BATCHES)}


@pytest.mark.parametrize("where", ["forward", "backward", "step", "commit", "committed"])
@pytest.mark.parametrize(("members", "lost"), [(2, 1), (3, 0), (4, 2)])
def test_what_a_killed_rank_accumulated_is_not_lost(undisturbed: str, members: int, lost: int, where: str) -> None:
    values = job({f"n0.{lost}": (6, where)}, members=members, env=MERGE).run()  # the third batch of an update
    assert {value[:2] for value in values.values()} == {(undisturbed, BATCHES)}
    assert len(values) == members - 1


@pytest.mark.parametrize("at", [6, 7])
def test_a_rank_that_gave_up_a_batch_that_others_have_keeps_it(undisturbed: str, at: int) -> None:
    values = job({"n0.0": (at, "give up"), "n0.1": (at, "committed")}, members=3, env=MERGE).run()
    assert {value[:2] for value in values.values()} == {(undisturbed, BATCHES)}
    assert len(values) == 2


@pytest.mark.parametrize(("at", "where"), [(7, "backward"), (7, "commit"), (8, "updated"), (8, "gathered")])
def test_shards_of_a_rank_that_is_killed_around_an_update_move(undisturbed: str, at: int, where: str) -> None:
    values = job({"n0.1": (at, where)}, members=3, env=MIRROR).run()
    assert {value[:2] for value in values.values()} == {(undisturbed, BATCHES)}
    assert len(values) == 2


@pytest.mark.parametrize("env", [MERGE, MIRROR])
def test_a_joiner_takes_over_what_was_accumulated(undisturbed: str, env: dict[str, str]) -> None:
    env = {**env, "AWAITS_REPLACEMENT": "1"}
    values = job({"n0.1": (5, "backward")}, members=2, replaces=True, env=env).run()  # it joins before the third batch
    assert {value[:2] for value in values.values()} == {(undisturbed, BATCHES)}
    assert set(values) == {"n0.0", "n0.2"}


def train_with_checkpoints(folder: str, ends_at: int) -> tuple[str, int]:
    """Train with a Checkpointer that saves inside the group of an update; all members end after some batches."""
    torch.manual_seed(3)
    net = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    data = TensorDataset(torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1)))
    model, optimizer, loader = px.distribute(
        net, optimizer, data, global_batch=GLOBAL, seed=5, strategy=strategy_of_job()
    )
    checkpointer = px.Checkpointer(folder, model, optimizer, loader, every=3, background=False)
    checkpointer.resume()
    began, batches = loader.position // GLOBAL + loader.epoch * (SAMPLES // GLOBAL), 0
    for _ in range(loader.epoch, EPOCHS):
        for (x,) in loader:
            before = px.init().recovery.committed
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if px.init().recovery.committed == before:
                continue  # another replica of this rank comes
            checkpointer.step()
            batches += 1
            if batches == ends_at:
                os.kill(os.getpid(), signal.SIGKILL)
    return digest(model), began


def test_a_job_goes_on_from_a_checkpoint_inside_the_group_of_an_update(tmp_path: Path) -> None:
    env = {**MERGE, "PHALANX_REPLICAS": str(REPLICAS)}
    whole = FakeLauncher(train_with_checkpoints, str(tmp_path / "whole"), 0, members=2, env=env).run()
    assert not FakeLauncher(train_with_checkpoints, str(tmp_path / "ended"), 8, members=2, env=env).run()
    resumed = FakeLauncher(train_with_checkpoints, str(tmp_path / "ended"), 0, members=3, env=env).run()
    assert {began for _, began in resumed.values()} == {6}
    assert {weights for weights, _ in resumed.values()} == {weights for weights, _ in whole.values()}


def train_unevenly() -> tuple[list[Tensor], list[bool]]:
    """Train a net without batch norm and dropout, whose last batch of an epoch is not full."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    generator = torch.Generator().manual_seed(2)
    data = TensorDataset(torch.randn(80, 6, generator=generator), torch.randint(3, (80,), generator=generator))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    model, optimizer, loader = px.distribute(
        net, optimizer, data, global_batch=GLOBAL, seed=5, strategy=strategy_of_job()
    )
    updated = []
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            updated.append(has_updated(optimizer))
    return [param.detach().clone() for param in model.parameters()], updated


def test_the_weights_are_those_of_a_job_that_is_not_elastic() -> None:
    ((expected, _),) = run_ranks(train_unevenly, 1, env=MERGE)
    values = FakeLauncher(train_unevenly, members=4, env={**MERGE, "PHALANX_REPLICAS": str(REPLICAS)}).run()
    for weights, updated in values.values():
        torch.testing.assert_close(weights, expected)
        assert updated == [False, False, False, True] * 3
