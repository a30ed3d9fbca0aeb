"""Elastic jobs that shard optimizer state: shards of lost ranks come from mirrors, and the bits stay."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import phalanx as px
from elastic_training import EPOCHS, GLOBAL, REPLICAS, SAMPLES, Net, digest, images, job, strategy_of_job, train
from fake_launcher import FakeLauncher
from phalanx.errors import ConfigError
from phalanx.parallel.session import session
from phalanx.parallel.step.gate import has_updated
from ranks import RankFailedError, run_ranks

pytestmark = pytest.mark.dist

MIRROR = {"SHARDING": json.dumps({"mirror": 1})}
NO_MIRROR = {"SHARDING": json.dumps({"stage": 2})}
STAGE_3 = {"SHARDING": json.dumps({"stage": 3, "mirror": 1})}


@pytest.fixture(scope="module")
def undisturbed() -> str:
    """The weights of one process with as many replicas, which shards nothing."""
    ((weights, updates, _, _),) = run_ranks(train, 1, {}, env={"PHALANX_REPLICAS": str(REPLICAS)})
    assert updates == EPOCHS * SAMPLES // GLOBAL
    return weights


@pytest.mark.parametrize("env", [MIRROR, NO_MIRROR, STAGE_3])
def test_without_a_loss_the_weights_are_those_of_whole_state(undisturbed: str, env: dict[str, str]) -> None:
    values = job({}, members=3, env=env).run()
    assert {value[0] for value in values.values()} == {undisturbed}


@pytest.mark.parametrize(
    "where", ["forward", "backward", "step", "commit", "committed", "updated", "gathered", "shared"]
)
@pytest.mark.parametrize(("members", "lost"), [(2, 1), (3, 0), (4, 2)])
def test_survivors_take_the_shard_of_a_killed_rank_from_its_mirror(
    undisturbed: str, members: int, lost: int, where: str
) -> None:
    values = job({f"n0.{lost}": (4, where)}, members=members, env=MIRROR).run()
    assert len(values) == members - 1
    assert {value[:2] for value in values.values()} == {(undisturbed, 12)}
    assert {value[3] for value in values.values()} == {members - 1}


@pytest.mark.parametrize("where", ["forward", "backward", "updated", "gathered"])
def test_two_ranks_whose_mirrors_are_left_are_lost_in_one_step(undisturbed: str, where: str) -> None:
    values = job({"n0.0": (5, where), "n0.2": (5, "backward")}, members=4, env=MIRROR).run()
    assert {value[:2] for value in values.values()} == {(undisturbed, 12)}
    assert set(values) == {"n0.1", "n0.3"}


@pytest.mark.parametrize("where", ["exchange", "agreed", "reshard", "resharded", "recovered"])
def test_a_second_rank_lost_while_the_others_recover(undisturbed: str, where: str) -> None:
    values = job({"n0.0": (4, "backward"), "n0.2": (4, where)}, members=4, env=MIRROR).run()
    assert {value[:2] for value in values.values()} == {(undisturbed, 12)}
    assert set(values) == {"n0.1", "n0.3"}


@pytest.mark.parametrize("at", [5, 11])
@pytest.mark.parametrize("second", ["give up", "updated", "gathered"])
def test_a_loss_while_members_are_at_different_points_of_an_update(undisturbed: str, at: int, second: str) -> None:
    """One is lost after it has committed; another is behind, or waits for parameters."""
    at_of_second = at if second == "give up" else at + 1
    env = {**MIRROR, "PHALANX_PATIENCE_S": "0.5"}
    lost = job({"n0.3": (at, "committed"), "n0.1": (at_of_second, second)}, members=4, env=env)
    values = lost.run()
    assert {value[:2] for value in values.values()} == {(undisturbed, 12)}
    assert set(values) == ({"n0.0", "n0.1", "n0.2"} if second == "give up" else {"n0.0", "n0.2"})


@pytest.mark.parametrize("where", ["forward", "backward", "updated"])
def test_a_rank_is_lost_under_stage_3(undisturbed: str, where: str) -> None:
    lost = job({"n0.1": (4, where)}, members=3, env=STAGE_3)
    values = lost.run()
    assert {value[:2] for value in values.values()} == {(undisturbed, 12)}
    assert set(values) == {"n0.0", "n0.2"}
    assert "Stage 3 acts as stage 1: parameters and gradients stay whole" in lost.outputs["n0.0"]


@pytest.mark.parametrize("where", ["backward", "updated", "gathered"])
def test_hosts_go_on_without_a_lost_rank(undisturbed: str, where: str) -> None:
    values = job({"n0.1": (4, where)}, members=3, hosts=2, env=MIRROR).run()
    assert {value[:2] for value in values.values()} == {(undisturbed, 12)}
    assert len(values) == 2


def test_a_frozen_rank_is_fenced_while_others_wait_for_its_parameters(undisturbed: str) -> None:
    env = {**MIRROR, "FREEZE": "1", "PHALANX_PATIENCE_S": "0.5"}
    frozen = job({"n0.1": (6, "updated")}, members=3, env=env)
    values = frozen.run()
    assert {value[:2] for value in values.values()} == {(undisturbed, 12)}
    assert frozen.events("suspect")


@pytest.mark.parametrize("env", [MIRROR, NO_MIRROR])
def test_a_joiner_takes_its_shard_from_the_others(undisturbed: str, env: dict[str, str]) -> None:
    values = job({}, (2,), members=2, env=env).run()
    assert {value[:2] for value in values.values()} == {(undisturbed, 12)}
    assert values["n0.0"][3] == 3


def test_a_job_that_begins_with_one_rank_is_joined(undisturbed: str) -> None:
    values = job({}, (2,), members=1, env=NO_MIRROR).run()
    assert {value[:2] for value in values.values()} == {(undisturbed, 12)}
    assert values["n0.0"][3] == 2


@pytest.mark.parametrize("env", [MIRROR, NO_MIRROR])
@pytest.mark.parametrize("leaver", ["n0.0", "n0.2"])
def test_a_rank_that_leaves_hands_its_shard_over(undisturbed: str, env: dict[str, str], leaver: str) -> None:
    values = job({}, (), (leaver, 5), members=3, env=env).run()
    stay = {"n0.0", "n0.1", "n0.2"} - {leaver}
    assert {values[id][:2] for id in stay} == {(undisturbed, 12)}
    assert {values[id][3] for id in stay} == {2}


def test_a_rank_lost_while_another_hands_over(undisturbed: str) -> None:
    values = job({"n0.0": (6, "reshard")}, (), ("n0.2", 5), members=4, env=MIRROR).run()
    assert {values[id][:2] for id in ("n0.1", "n0.3")} == {(undisturbed, 12)}


def test_a_lost_rank_is_replaced(undisturbed: str) -> None:
    replaced = job({"n0.1": (2, "backward")}, members=2, replaces=True, env={**MIRROR, "AWAITS_REPLACEMENT": "1"})
    values = replaced.run()
    assert {value[0] for value in values.values()} == {undisturbed}
    assert set(values) == {"n0.0", "n0.2"}


@pytest.mark.parametrize(
    ("env", "faults", "why"),
    [
        (NO_MIRROR, {"n0.1": (4, "backward")}, "had no mirror (mirror=1)"),
        (NO_MIRROR, {"n0.1": (5, "updated")}, "had no mirror (mirror=1)"),
        (MIRROR, {"n0.1": (4, "backward"), "n0.2": (4, "backward")}, "together with their mirrors"),
    ],
)
def test_without_any_copy_of_a_shard_all_say_so_and_end(
    env: dict[str, str], faults: dict[str, tuple[int, str]], why: str
) -> None:
    lost = job(faults, members=4, env=env)
    with pytest.raises(RankFailedError, match="newest checkpoint"):
        lost.run()
    told = [event["why"] for event in lost.events("abandon")]
    assert len(told) == 4 - len(faults)
    assert all(why in text for text in told)


def test_what_is_lost_with_a_rank_is_said_at_start() -> None:
    quiet, warned = job({}, members=2, env=MIRROR), job({}, members=2, env=NO_MIRROR)
    quiet.run()
    warned.run()
    assert "without mirror=1 a lost rank's ZeRO shard comes from the newest checkpoint" in warned.outputs["n0.0"]
    assert "Stage 2 acts as stage 1" in warned.outputs["n0.0"]
    assert "newest checkpoint" not in quiet.outputs["n0.0"]


def train_with_checkpoints(folder: str, faults: dict[str, int], until: int) -> Any:
    """Train to the end or `until`, with a checkpoint every 3 updates; a member ends in the save at its update."""
    own = os.environ.get("PHALANX_MEMBER_ID", "")
    torch.manual_seed(3)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    strategy = px.DistributedStrategy(sharding=True)
    model, optimizer, loader = px.distribute(
        net, optimizer, TensorDataset(*images()), global_batch=GLOBAL, seed=5, strategy=strategy, mirror=1
    )
    checkpointer = px.Checkpointer(folder, model, optimizer, loader, every=3, background=False)
    checkpointer.resume()
    if own in faults:
        shards = px.init().recovery.shards.of(session.optimizers[optimizer].shards)
        collect = shards.collect

        def collect_or_end() -> Any:
            if checkpointer.steps == faults[own]:
                os.kill(os.getpid(), signal.SIGKILL)
            return collect()

        shards.collect = collect_or_end
    for _ in range(loader.epoch, EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if has_updated(optimizer):
                checkpointer.step()
                if checkpointer.steps == until:
                    checkpointer.close()
                    return digest(model), checkpointer.steps
    checkpointer.close()
    return digest(model), checkpointer.steps


def test_checkpoints_hold_the_state_of_all_ranks_also_where_one_is_lost_in_a_save(tmp_path: Path) -> None:
    """And resume at another number of ranks, in a job of any kind."""
    env = {"PHALANX_REPLICAS": str(REPLICAS)}
    ((expected, _),) = run_ranks(train_with_checkpoints, 1, str(tmp_path / "one"), {}, 0, env=env)
    folder = str(tmp_path / "elastic")
    first = FakeLauncher(train_with_checkpoints, folder, {"n0.1": 3}, 6, members=3, env=env).run()
    assert {value[1] for value in first.values()} == {6}
    assert len(first) == 2
    second = FakeLauncher(train_with_checkpoints, folder, {}, 9, members=4, env=env).run()
    assert {value[1] for value in second.values()} == {9}
    assert run_ranks(train_with_checkpoints, 2, folder, {}, 0, env=env) == [(expected, 12)] * 2


def ask_for_part_of_the_state() -> None:
    net = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    px.distribute(net, optimizer, strategy=px.DistributedStrategy(sharding=True))
    with pytest.raises(ConfigError, match=r"px\.Checkpointer, which gather it"):
        optimizer.state_dict()


def explain_memory() -> None:
    net = nn.Linear(64, 63)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(8, 64))
    strategy = strategy_of_job()
    model, optimizer, loader = px.distribute(net, optimizer, data, global_batch=8, strategy=strategy)
    for (x,) in loader:
        model(x).sum().backward()
        optimizer.step()
    found = px.explain(model, optimizer=optimizer).memory.optimizer
    state = session.optimizers[optimizer].shards._state.values()
    assert abs(found - sum(value.nbytes for entries in state for value in entries.values())) < 32


def test_explain_counts_the_shards_of_a_rank() -> None:
    for env in (MIRROR, NO_MIRROR):
        FakeLauncher(explain_memory, members=3, env={"PHALANX_REPLICAS": "4", **env}).run()


def give_what(settings: dict[str, Any], why: str) -> None:
    net = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match=why):
        px.distribute(
            net, torch.optim.SGD(net.parameters()), strategy=px.DistributedStrategy(sharding=True, **settings)
        )


def test_what_shards_cannot_do_is_an_error_that_says_so() -> None:
    env = {"PHALANX_REPLICAS": "2"}
    FakeLauncher(ask_for_part_of_the_state, members=2, env=env).run()
    FakeLauncher(give_what, {"lamb": True}, "norms of whole parameters", members=1, env=env).run()
