"""Elastic jobs: ranks are lost, leave and join, and the trained weights have the bits of the undisturbed run."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import phalanx as px
from dist.test_logical_replicas import error_of
from dist.test_replica_leaving import distributed
from elastic_training import EPOCHS, GLOBAL, REPLICAS, SAMPLES, Net, digest, images, job, train
from fake_launcher import FakeLauncher, spawn, tell
from phalanx.checkpoint import saving
from phalanx.comm.elastic import membership
from phalanx.errors import ConfigError
from phalanx.parallel.step.gate import has_updated
from ranks import RankFailedError, run_ranks

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def undisturbed() -> str:
    """The weights of one process with as many replicas."""
    ((weights, updates, _, _),) = run_ranks(train, 1, {}, env={"PHALANX_REPLICAS": str(REPLICAS)})
    assert updates == EPOCHS * SAMPLES // GLOBAL
    return weights


def test_without_a_loss_an_elastic_job_trains_as_any_other(undisturbed: str) -> None:
    values = job({}, members=3).run()
    assert {value[0] for value in values.values()} == {undisturbed}


@pytest.mark.parametrize("where", ["forward", "backward", "step", "after"])
@pytest.mark.parametrize(("members", "lost"), [(2, 1), (3, 0), (4, 2)])
def test_survivors_finish_the_step_of_a_killed_rank(undisturbed: str, members: int, lost: int, where: str) -> None:
    values = job({f"n0.{lost}": (4, where)}, members=members).run()
    assert len(values) == members - 1
    assert {value[:2] for value in values.values()} == {(undisturbed, 12)}
    assert {value[3] for value in values.values()} == {members - 1}


@pytest.mark.parametrize("where", ["forward", "backward", "step", "after"])
def test_two_ranks_lost_in_one_step(undisturbed: str, where: str) -> None:
    values = job({"n0.0": (5, where), "n0.3": (5, "backward")}, members=4).run()
    assert {value[:2] for value in values.values()} == {(undisturbed, 12)}
    assert len(values) == 2


def test_a_rank_lost_while_its_peers_replicas_are_computed_again(undisturbed: str) -> None:
    values = job({"n0.2": (3, "backward"), "n0.1": (4, "forward"), "n0.3": (4, "forward")}, members=4).run()
    assert {value[:2] for value in values.values()} == {(undisturbed, 12)}
    assert set(values) == {"n0.0"}


def test_a_frozen_rank_is_fenced(undisturbed: str) -> None:
    env = {"FREEZE": "1", "PHALANX_PATIENCE_S": "0.5"}
    frozen = job({"n0.1": (6, "backward")}, members=3, env=env)
    values = frozen.run()
    assert {value[:2] for value in values.values()} == {(undisturbed, 12)}
    assert len(values) == 2
    assert frozen.events("suspect")


@pytest.mark.parametrize(("members", "lost", "where"), [(2, 1, "backward"), (3, 1, "forward"), (4, 3, "step")])
def test_hosts_go_on_without_a_lost_rank(undisturbed: str, members: int, lost: int, where: str) -> None:
    values = job({f"n0.{lost}": (4, where)}, members=members, hosts=2).run()
    assert {value[:2] for value in values.values()} == {(undisturbed, 12)}
    assert len(values) == members - 1


def test_a_frozen_rank_that_is_alone_on_its_host_is_fenced(undisturbed: str) -> None:
    env = {"FREEZE": "1", "PHALANX_PATIENCE_S": "0.5"}
    values = job({"n0.1": (6, "backward")}, members=3, hosts=2, env=env).run()
    assert {value[:2] for value in values.values()} == {(undisturbed, 12)}
    assert len(values) == 2


def test_a_joiner_takes_part_with_the_same_result(undisturbed: str) -> None:
    joined = job({}, (2,), members=2)
    values = joined.run()
    assert {value[:2] for value in values.values()} == {(undisturbed, 12)}
    assert len(values) == 3
    assert values["n0.0"][3] == 3


def train_over_gloo(spawns: tuple[int, ...]) -> str:
    px.init(backend="gloo")
    train({}, spawns)
    return str(dist.get_backend())


@pytest.mark.parametrize("members", [1, 2])
def test_a_joiner_and_a_rank_that_began_alone_use_the_backend_of_the_script(members: int) -> None:
    env = {"PHALANX_REPLICAS": str(REPLICAS), "SLOW": "1"}
    values = FakeLauncher(train_over_gloo, (2,), members=members, env=env).run()
    assert list(values.values()) == ["gloo"] * (members + 1)


def test_a_lost_rank_is_replaced(undisturbed: str) -> None:
    replaced = job({"n0.1": (2, "backward")}, members=2, replaces=True, env={"AWAITS_REPLACEMENT": "1"})
    values = replaced.run()
    assert {value[0] for value in values.values()} == {undisturbed}
    assert set(values) == {"n0.0", "n0.2"}


def test_a_rank_leaves_between_two_steps(undisturbed: str) -> None:
    values = job({}, (), ("n0.2", 5), members=3).run()
    assert values["n0.0"][:2] == (undisturbed, 12)
    assert values["n0.0"][3] == 2


def train_with_checkpoints(folder: str, faults: dict[str, int], spawn_at: int) -> Any:
    """Train with a Checkpointer; a member ends at its update, inside a save where one is due."""
    own = os.environ.get("PHALANX_MEMBER_ID", "")
    torch.manual_seed(3)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, loader = px.distribute(net, optimizer, TensorDataset(*images()), global_batch=GLOBAL, seed=5)
    checkpointer = px.Checkpointer(folder, model, optimizer, loader, every=3, background=False)
    checkpointer.resume()
    if own in faults:
        saving.clean = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # a save is complete on disk before this
    for _ in range(loader.epoch, EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if has_updated(optimizer):
                checkpointer.step()
                if own == "n0.0" and checkpointer.steps == spawn_at:
                    spawn()
    checkpointer.close()
    return digest(model), checkpointer.steps


def test_a_rank_lost_while_it_saves(tmp_path: Path) -> None:
    env = {"PHALANX_REPLICAS": str(REPLICAS)}
    ((expected, _),) = run_ranks(train_with_checkpoints, 1, str(tmp_path / "one"), {}, 0, env=env)
    folder = tmp_path / "elastic"
    values = FakeLauncher(train_with_checkpoints, str(folder), {"n0.0": 6}, 0, members=3, env=env).run()
    assert {value for value in values.values()} == {(expected, 12)}
    assert len(values) == 2
    assert (folder / "step-12").exists()


def test_a_joiner_resumes_from_a_peer_and_not_from_the_checkpoint(tmp_path: Path) -> None:
    env = {"PHALANX_REPLICAS": str(REPLICAS)}
    ((expected, _),) = run_ranks(train_with_checkpoints, 1, str(tmp_path / "one"), {}, 0, env=env)
    job = FakeLauncher(train_with_checkpoints, str(tmp_path / "elastic"), {}, 4, members=2, env=env)
    values = job.run()
    assert list(values.values()) == [(expected, 12)] * 3


class Loses(px.Callback):
    """Ends a member at one of its steps."""

    def __init__(self, member: str, step: int) -> None:
        self.is_meant, self.step = os.environ.get("PHALANX_MEMBER_ID") == member, step

    def on_step_end(self, run: px.Run) -> None:
        if self.is_meant and run.step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class Spawns(px.Callback):
    """Has the first member ask for another one after its first update."""

    def __init__(self, *, is_meant: bool) -> None:
        self.is_meant = is_meant and os.environ.get("PHALANX_MEMBER_ID") == "n0.0"

    def on_update(self, run: px.Run) -> None:
        if self.is_meant:
            self.is_meant = False
            spawn()


def train_model(member: str, step: int, *, spawns: bool = False) -> Any:
    torch.manual_seed(3)
    net = Net()
    model = px.Model(net, nn.CrossEntropyLoss(), torch.optim.AdamW(net.parameters(), lr=0.01), metrics={"acc1"})
    data = TensorDataset(*images())
    model.train(EPOCHS, data, callbacks=[Loses(member, step), Spawns(is_meant=spawns)], global_batch=GLOBAL, seed=5)
    return digest(net), model.eval(data)["acc1"]


def test_a_model_goes_on_without_a_lost_rank() -> None:
    env = {"PHALANX_REPLICAS": str(REPLICAS)}
    ((expected, accuracy),) = run_ranks(train_model, 1, "", 0, env=env)
    values = FakeLauncher(train_model, "n0.1", 6, members=3, env=env).run()
    assert list(values.values()) == [(expected, accuracy)] * 2
    values = FakeLauncher(partial(train_model, spawns=True), "", 0, members=2, env=env).run()
    assert list(values.values()) == [(expected, accuracy)] * 3


class Stops(px.Callback):
    """Ends the training of all ranks after a step, by a request of one rank or of all."""

    def __init__(self, step: int, *, only: int | None = None) -> None:
        self.step, self.only = step, only

    def on_step_end(self, run: px.Run) -> None:
        if run.step == self.step and self.only in (None, run.rank):
            run.stop("enough")


def train_twice(only: int | None) -> Any:
    """Train until a callback stops it, and then once more; return the steps of both."""
    torch.manual_seed(3)
    net = Net()
    model = px.Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.01))
    counts = []
    for callback in (Stops(2, only=only), Stops(-1)):
        counter = Counts()
        model.train(EPOCHS, TensorDataset(*images()), callbacks=[callback, counter], global_batch=GLOBAL, seed=5)
        counts.append((counter.steps, counter.reason))
    return counts


class SpawnsInTheSecond(px.Callback):
    """Lets a rank join in the second training of a member."""

    def on_update(self, run: px.Run) -> None:
        current = membership.current()
        if os.environ.get("PHALANX_MEMBER_ID") == "n0.0" and run.step == 2 and current is not None:
            assert current.view is not None
            tell("spawn")
            current.await_newer(current.view.epoch)


def train_a_second_time() -> str:
    torch.manual_seed(3)
    net = Net()
    model = px.Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.01))
    for callbacks in ([], [SpawnsInTheSecond()]):
        model.train(EPOCHS, TensorDataset(*images()), callbacks=callbacks, global_batch=GLOBAL, seed=5)
    return digest(net)


def test_a_rank_that_would_join_in_an_earlier_training_ends_and_the_others_go_on() -> None:
    env = {"PHALANX_REPLICAS": str(REPLICAS)}
    (expected,) = run_ranks(train_a_second_time, 1, env=env)
    job = FakeLauncher(train_a_second_time, members=2, env=env)
    refusal = r"joins a job with its 1st (loader|run), which the other ranks have ended: they have made 2"
    with pytest.raises(RankFailedError, match=refusal):
        job.run()
    outcomes = {id: member.rank.outcome for id, member in job.members.items()}
    assert [outcomes[id].value for id in ("n0.0", "n0.1")] == [expected] * 2
    assert outcomes["n0.2"].failed


class Counts(px.Callback):
    steps, reason = 0, None

    def on_train_end(self, run: px.Run) -> None:
        self.steps, self.reason = run.step, run.stop_reason


@pytest.mark.parametrize("only", [None, 1])
def test_a_stopped_training_does_not_stop_the_next_one(only: int | None) -> None:
    values = FakeLauncher(train_twice, only, members=2, env={"PHALANX_REPLICAS": str(REPLICAS)}).run()
    assert list(values.values()) == [[(3, "enough"), (EPOCHS * SAMPLES // GLOBAL, None)]] * 2


@pytest.mark.parametrize("at", [5, 11])
def test_a_member_that_gave_up_a_commit_the_others_completed_updates_too(undisturbed: str, at: int) -> None:
    values = job(
        {"n0.2": (at, "committed"), "n0.1": (at, "give up")}, members=3, env={"PHALANX_PATIENCE_S": "0.5"}
    ).run()
    assert {value[:2] for value in values.values()} == {(undisturbed, 12)}
    assert set(values) == {"n0.0", "n0.1"}


def test_sums_that_all_have_are_not_computed_again(undisturbed: str) -> None:
    lost = job({"n0.1": (6, "commit")}, members=3)
    values = lost.run()
    assert {value[:2] for value in values.values()} == {(undisturbed, 12)}
    assert [event["redone"] for event in lost.events("joined") if event["epoch"] == 1] == [0, 0]


@pytest.mark.parametrize("where", ["exchange", "agreed", "recovered"])
def test_a_second_rank_lost_while_the_others_recover(undisturbed: str, where: str) -> None:
    values = job({"n0.0": (4, "backward"), "n0.2": (4, where)}, members=4).run()
    assert {value[:2] for value in values.values()} == {(undisturbed, 12)}
    assert set(values) == {"n0.1", "n0.3"}


def test_a_rank_that_freezes_while_the_others_recover_is_fenced(undisturbed: str) -> None:
    env = {"FREEZE": "1", "PHALANX_PATIENCE_S": "0.5"}
    frozen = job({"n0.0": (4, "backward"), "n0.2": (4, "agreed")}, members=4, env=env)
    values = frozen.run()
    assert {value[:2] for value in values.values()} == {(undisturbed, 12)}
    assert set(values) == {"n0.1", "n0.3"}


def test_a_joiner_waits_while_the_others_finish_what_a_lost_rank_left(undisturbed: str) -> None:
    """The rank that was to give the joiner its state ends; the others have begun the next global batch by then."""
    joined = job({"n0.0": (-1, "send")}, (2,), members=3)
    values = joined.run()
    assert {value[0] for value in values.values()} == {undisturbed}
    assert set(values) == {"n0.1", "n0.2", "n0.3"}


def test_a_rank_that_ends_while_it_leaves(undisturbed: str) -> None:
    values = job({"n0.2": (5, "commit")}, (), ("n0.2", 5), members=3).run()
    assert {value[:2] for value in values.values()} == {(undisturbed, 12)}
    assert {value[3] for value in values.values()} == {2}


def test_a_group_that_only_some_members_began_to_form(undisturbed: str) -> None:
    values = job({"n0.2": (5, "commit"), "n0.1": (5, "form")}, members=3, env={"IMPATIENT": "1"}).run()
    assert {value[:2] for value in values.values()} == {(undisturbed, 12)}


def test_a_rank_lost_right_after_a_joiner_was_taken_in(undisturbed: str) -> None:
    joined = job({"n0.1": (-1, "recovered")}, (2,), members=2)
    values = joined.run()
    assert {value[0] for value in values.values()} == {undisturbed}
    assert set(values) == {"n0.0", "n0.2"}


def loop_that_others_could_not_finish(name: str, why: str) -> None:
    """Train with a replica on each rank; the error comes before a rank is lost, not after."""
    net, other = nn.Linear(3, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (net, other)]
    data = TensorDataset(torch.randn(8, 3))
    model, _, loader = px.distribute(net, optimizers[0], data, global_batch=4)
    px.distribute(other, optimizers[1])
    with pytest.raises(ConfigError, match=why):
        for (x,) in loader:
            for optimizer in optimizers if name != "accumulates" else ():
                optimizer.zero_grad()
            model(x).mean().backward()
            if name == "two passes":
                model(x).square().mean().backward()
            if name != "accumulates":
                optimizers[0].step()
                other(model(x).detach()).mean().backward()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("two passes", "two backward passes of a model ran for one batch"),
        ("adversaries", "after an optimizer's step in the pass of one logical replica"),
        ("accumulates", "added to gradients that were there before"),
    ],
)
def test_a_loop_that_others_could_not_finish_is_an_error_before_a_rank_is_lost(name: str, why: str) -> None:
    FakeLauncher(loop_that_others_could_not_finish, name, why, members=2, env={"PHALANX_REPLICAS": "2"}).run()


def leave_by_batches(stop: int) -> Any:
    net, optimizer, loader = distributed()
    updates, last = 0, digest(net)

    def train() -> None:
        nonlocal updates, last
        for _ in range(3):
            for number, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                F.cross_entropy(net(x), y).backward()
                optimizer.step()
                if has_updated(optimizer):
                    updates, last = updates + 1, digest(net)
                if number == stop:
                    break

    return error_of(train), updates, last, digest(net)


@pytest.mark.parametrize("stop", [2, 3])
def test_leaving_an_epoch_after_a_number_of_batches_is_the_same_error_on_all_before_a_wrong_update(stop: int) -> None:
    values = FakeLauncher(leave_by_batches, stop, members=2, env={"PHALANX_REPLICAS": "3"}).run()
    (first, updates, last, weights), second = values["n0.0"], values["n0.1"]
    assert second == values["n0.0"]  # the same text, by which the launcher knows a mistake of the script
    assert "the ranks compute different global batches: between epoch 0 and 1" in first
    assert "Count updates, not batches" in first
    assert updates > 0
    assert weights == last
