"""Elastic jobs with several models and optimizers, whose state is sharded: the weights are those of one process."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import phalanx as px
from elastic_training import EPOCHS, GLOBAL, REPLICAS, SAMPLES, digest, end, reach_inside, strategy_of_job
from fake_launcher import FakeLauncher, spawn, tell
from phalanx.errors import PeerLostError
from phalanx.parallel.elastic import shard_recovery
from phalanx.parallel.step.gate import has_updated
from ranks import RankFailedError, run_ranks

pytestmark = pytest.mark.dist

WIDTH = 9
MIRROR = {"SHARDING": '{"mirror": 1}'}
NO_MIRROR = {"SHARDING": "{}"}
WHOLE: dict[str, str] = {}


def net(outputs: int) -> nn.Module:
    body = nn.Linear(WIDTH, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Dropout(0.2)
    return nn.Sequential(*body, nn.Linear(40, outputs))


def losses(critic: nn.Module, generator: nn.Module, x: Tensor) -> Tensor:
    """Return the loss of both, for one backward pass."""
    fake = generator(torch.randn_like(x))
    of_critic = F.softplus(-critic(x)).mean() + F.softplus(critic(fake.detach())).mean()
    critic.requires_grad_(False)
    of_generator = F.softplus(-critic(fake)).mean()
    critic.requires_grad_(True)
    return of_critic + of_generator


def reach_second(at: int, where: str) -> None:
    """Let a fault happen in an update of the second optimizer; or let a member give up when it has the first's."""
    kind = shard_recovery.ShardRecovery
    share_update, meet = kind.share_update, kind.meet
    sharing: list[int] = []

    def is_due(name: str) -> bool:
        return where == name and px.init().recovery.committed == at

    def share(shards: Any) -> None:
        if shards.number == 1 and is_due("second updated"):
            end(where)
        sharing[:] = [shards.number]
        try:
            share_update(shards)
        finally:
            sharing.clear()
        if shards.number == 1 and is_due("second shared"):
            end(where)

    def meet_or_end(shards: Any) -> None:
        if sharing == [1] and is_due("second gathered"):
            end(where)
        meet(shards)
        if sharing == [0] and is_due("give up first"):
            raise PeerLostError("given up while the others complete it")

    kind.share_update, kind.meet = share, meet_or_end  # type: ignore[method-assign]


def train(faults: dict[str, tuple[int, str]], spawns: tuple[int, ...] = (), leaves: tuple[str, int] = ("", 0)) -> Any:
    """Train two adversaries; a member ends at (updates done, where) of its id."""
    own = os.environ.get("PHALANX_MEMBER_ID", "")
    torch.manual_seed(3)
    critic, generator = net(1), net(WIDTH)
    optimizers: list[Any] = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (critic, generator)]
    data = TensorDataset(torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(0)))
    strategy = strategy_of_job()
    *_, loader = px.distribute(critic, optimizers[0], data, global_batch=GLOBAL, seed=5, strategy=strategy)
    px.distribute(generator, optimizers[1])
    at, where = faults.get(own, (-1, "nowhere"))
    reach_inside(at, where)
    reach_second(at, where)
    updates, alternates = 0, bool(os.environ.get("ALTERNATES"))
    for _ in range(loader.epoch, EPOCHS):
        for (x,) in loader:
            context = px.init()
            if context.recovery is not None:
                updates = context.recovery.committed
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses(critic, generator, x).backward()
            if (updates, "backward") == (at, where):
                end(where)
            optimizers[0].step()
            if (updates, "between") == (at, where) and has_updated(optimizers[0]):
                end(where)
            if not alternates or updates % 3 == 0:
                optimizers[1].step()
            if has_updated(optimizers[0]):
                updates += 1
                if own == "n0.0" and updates in spawns:
                    spawn()
                if (own, updates) == leaves:
                    tell("leave", reason="asked to")
    return digest(critic) + digest(generator), updates, context.world_size


def job(*args: Any, members: int, env: dict[str, str]) -> FakeLauncher:
    return FakeLauncher(train, *args, members=members, env={"PHALANX_REPLICAS": str(REPLICAS), **env})


def in_one_process(**env: str) -> str:
    """Return the weights of one process with as many replicas, which shards nothing."""
    ((weights, updates, _),) = run_ranks(train, 1, {}, env={"PHALANX_REPLICAS": str(REPLICAS), **env})
    assert updates == EPOCHS * SAMPLES // GLOBAL
    return weights


@pytest.fixture(scope="module")
def undisturbed() -> str:
    return in_one_process()


@pytest.mark.parametrize("env", [WHOLE, MIRROR, NO_MIRROR])
def test_without_a_loss_the_weights_are_those_of_whole_state(undisturbed: str, env: dict[str, str]) -> None:
    values = job({}, members=3, env=env).run()
    assert set(values.values()) == {(undisturbed, 12, 3)}


@pytest.mark.parametrize("where", ["backward", "commit", "committed", "between"])
def test_survivors_of_a_job_with_whole_state_make_both_updates(undisturbed: str, where: str) -> None:
    values = job({"n0.1": (5, where)}, members=3, env=WHOLE).run()
    assert set(values.values()) == {(undisturbed, 12, 2)}


@pytest.mark.parametrize(
    ("at", "where"),
    [
        (4, "backward"),
        (4, "commit"),
        (4, "committed"),
        (5, "updated"),
        (5, "gathered"),
        (5, "shared"),
        (4, "between"),
        (5, "second updated"),
        (5, "second gathered"),
        (5, "second shared"),
        (12, "second updated"),
        (12, "second gathered"),
    ],
)
@pytest.mark.parametrize(("members", "lost"), [(2, 1), (4, 0)])
def test_survivors_take_the_shards_of_a_killed_rank_from_its_mirror(
    undisturbed: str, members: int, lost: int, at: int, where: str
) -> None:
    values = job({f"n0.{lost}": (at, where)}, members=members, env=MIRROR).run()
    assert len(values) == members - 1
    assert {value[:2] for value in values.values()} == {(undisturbed, 12)}


@pytest.mark.parametrize("at", [5, 12])
def test_a_loss_while_one_member_has_not_begun_the_second_update(undisturbed: str, at: int) -> None:
    """It has the first, as all others, who are in the second and wait for it and for the lost one."""
    values = job({"n0.3": (at, "second updated"), "n0.1": (at, "give up first")}, members=4, env=MIRROR).run()
    assert {value[:2] for value in values.values()} == {(undisturbed, 12)}
    assert len(values) == 3


@pytest.mark.parametrize("second", ["reshard", "resharded", "agreed", "recovered"])
def test_a_second_rank_lost_while_shards_of_both_move(undisturbed: str, second: str) -> None:
    values = job({"n0.0": (5, "second updated"), "n0.2": (5, second)}, members=4, env=MIRROR).run()
    assert {value[:2] for value in values.values()} == {(undisturbed, 12)}
    assert set(values) == {"n0.1", "n0.3"}


@pytest.mark.parametrize("env", [MIRROR, NO_MIRROR])
def test_ranks_join_and_leave(undisturbed: str, env: dict[str, str]) -> None:
    values = job({}, (2,), ("n0.1", 6), members=2, env=env).run()
    assert set(values) == {"n0.0", "n0.2"}
    assert set(values.values()) == {(undisturbed, 12, 2)}


@pytest.mark.parametrize(("at", "where"), [(4, "backward"), (7, "second updated"), (8, "gathered")])
def test_an_optimizer_that_steps_at_every_third_batch(at: int, where: str) -> None:
    expected = in_one_process(ALTERNATES="1")
    values = job({"n0.1": (at, where)}, members=3, env={**MIRROR, "ALTERNATES": "1"}).run()
    assert {value[:2] for value in values.values()} == {(expected, 12)}
    assert len(values) == 2


def distribute_less_than_the_others() -> str:
    """Train; a member that joins distributes one optimizer of two."""
    own = os.environ["PHALANX_MEMBER_ID"]
    critic, generator = net(1), net(WIDTH)
    optimizers: list[Any] = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (critic, generator)]
    data = TensorDataset(torch.randn(SAMPLES, WIDTH))
    *_, loader = px.distribute(critic, optimizers[0], data, global_batch=GLOBAL, strategy=strategy_of_job())
    if own == "n0.0":
        px.distribute(generator, optimizers[1])
    for (x,) in loader:
        losses(critic, generator, x).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if has_updated(optimizers[0]) and px.init().recovery.committed == 1:
            spawn()
    return "trained"


def test_a_joiner_that_has_not_distributed_all_optimizers_is_an_error_that_says_so() -> None:
    launcher = FakeLauncher(distribute_less_than_the_others, members=1, env={"PHALANX_REPLICAS": "2", **NO_MIRROR})
    with pytest.raises(RankFailedError, match="shard the state of 2 optimizers, and 1 of its own"):
        launcher.run()
    assert launcher.members["n0.0"].rank.outcome.value == "trained"
