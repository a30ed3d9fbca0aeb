"""Elastic jobs: ranks are lost, leave and join, and the trained weights have the bits of the undisturbed run."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import phalanx as px
from elastic_job import ElasticJob, tell
from phalanx.checkpoint import saving
from phalanx.comm import process_group
from phalanx.comm.elastic import membership
from phalanx.errors import PeerLostError
from phalanx.parallel.elastic import recovery
from phalanx.parallel.step.gate import has_updated
from ranks import run_ranks

pytestmark = pytest.mark.dist

REPLICAS, SAMPLES, GLOBAL, EPOCHS = 4, 96, 24, 3


def images() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLES, 3, 6, 6, generator=generator), torch.randint(0, 4, (SAMPLES,), generator=generator)


class Net(nn.Module):
    """Batch norm, dropout, and a point where a rank may be lost."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3))
        self.head = nn.Linear(8 * 16, 4)
        self.fault: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        if self.fault == "forward":
            end(self.fault)
        if self.fault == "backward" and hidden.requires_grad:
            hidden.register_hook(lambda _: end("backward"))
        return self.head(hidden)


def end(_where: str) -> None:
    os.kill(os.getpid(), signal.SIGSTOP if os.environ.get("FREEZE") else signal.SIGKILL)


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        found.update(name.encode() + value.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def reach_inside(at: int, where: str) -> None:
    """Let a fault happen where a member completes a global batch, or takes in another one."""

    def around(owner: Any, name: str, *, ends_before: str = "", ends_after: str = "", gives_up: str = "") -> None:
        function = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            is_due = at < 0 or px.init().recovery.committed == at  # any time, for what happens once
            if is_due and where == ends_before:
                end(where)
            result = function(*args, **kwargs)
            if is_due and where == ends_after:
                end(where)
            if is_due and where == gives_up:
                raise PeerLostError("given up while the others complete it")
            return result

        setattr(owner, name, call)

    if os.environ.get("IMPATIENT"):
        process_group.REFORM_TIMEOUT_S = 1.0
    if where == "form":
        fail_once(process_group, "_make_group")
    around(recovery.ElasticRecovery, "_commit", ends_before="commit", ends_after="committed", gives_up="give up")
    around(recovery.ElasticRecovery, "_exchange", ends_before="exchange", ends_after="agreed")
    around(recovery.ElasticRecovery, "_continue", ends_after="recovered")
    around(recovery, "send_state", ends_before="send", ends_after="sent")


def fail_once(owner: Any, name: str) -> None:
    function, calls = getattr(owner, name), []

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if len(calls) == 1:
            raise PeerLostError("given up while the others complete it")
        return function(*args, **kwargs)

    setattr(owner, name, call)


def train(faults: dict[str, tuple[int, str]], spawns: tuple[int, ...] = (), leaves: tuple[str, int] = ("", 0)) -> Any:
    """Train; a member ends at (updates done, where) of its id."""
    own = os.environ.get("PHALANX_MEMBER_ID", "")
    torch.manual_seed(3)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    model, optimizer, loader = px.distribute(net, optimizer, TensorDataset(*images()), global_batch=GLOBAL, seed=5)
    scheduler = px.follow_updates(torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5))
    at, where = faults.get(own, (-1, "nowhere"))
    reach_inside(at, where)
    updates, seen = 0, []
    for _ in range(loader.epoch, EPOCHS):
        for x, y in loader:
            context = px.init()
            if context.recovery is not None:
                updates = context.recovery.committed
            net.fault = where if updates == at else None
            if own == "n0.0" and os.environ.get("SLOW"):
                time.sleep(0.2)  # until a joiner is there
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
            if net.fault == "step":
                end("step")
            optimizer.step()
            scheduler.step()
            if has_updated(optimizer):
                updates += 1
                seen.append((loader.epoch, updates))
                if net.fault == "after":
                    end("after")
                if own == "n0.0" and updates in spawns:
                    tell("spawn")
                if (own, updates) == leaves:
                    tell("leave", reason="asked to")
    current = membership.current()
    epoch = -1 if current is None or current.view is None else current.view.epoch
    return digest(model), updates, epoch, context.world_size


@pytest.fixture(scope="module")
def undisturbed() -> str:
    """The weights of one process with as many replicas."""
    ((weights, updates, _, _),) = run_ranks(train, 1, {}, env={"PHALANX_REPLICAS": str(REPLICAS)})
    assert updates == EPOCHS * SAMPLES // GLOBAL
    return weights


def job(*args: Any, members: int, **options: Any) -> ElasticJob:
    return ElasticJob(train, *args, members=members, env={"PHALANX_REPLICAS": str(REPLICAS), **options.pop("env", {})}, **options)


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
    joined = job({}, (2,), members=2, env={"SLOW": "1"})
    values = joined.run()
    assert {value[:2] for value in values.values()} == {(undisturbed, 12)}
    assert len(values) == 3
    assert values["n0.0"][3] == 3


def test_a_lost_rank_is_replaced(undisturbed: str) -> None:
    replaced = job({"n0.1": (2, "backward")}, members=2, replaces=True, env={"SLOW": "1"})
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
            if own == "n0.0" and os.environ.get("SLOW"):
                time.sleep(0.2)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if has_updated(optimizer):
                checkpointer.step()
                if own == "n0.0" and checkpointer.steps == spawn_at:
                    tell("spawn")
    checkpointer.close()
    return digest(model), checkpointer.steps


def test_a_rank_lost_while_it_saves(tmp_path: Path) -> None:
    env = {"PHALANX_REPLICAS": str(REPLICAS)}
    ((expected, _),) = run_ranks(train_with_checkpoints, 1, str(tmp_path / "one"), {}, 0, env=env)
    folder = tmp_path / "elastic"
    values = ElasticJob(train_with_checkpoints, str(folder), {"n0.0": 6}, 0, members=3, env=env).run()
    assert {value for value in values.values()} == {(expected, 12)}
    assert len(values) == 2
    assert (folder / "step-12").exists()


def test_a_joiner_resumes_from_a_peer_and_not_from_the_checkpoint(tmp_path: Path) -> None:
    env = {"PHALANX_REPLICAS": str(REPLICAS)}
    ((expected, _),) = run_ranks(train_with_checkpoints, 1, str(tmp_path / "one"), {}, 0, env=env)
    job = ElasticJob(train_with_checkpoints, str(tmp_path / "elastic"), {}, 4, members=2, env={**env, "SLOW": "1"})
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
    def on_update(self, run: px.Run) -> None:
        if os.environ.get("PHALANX_MEMBER_ID") == "n0.0" and os.environ.get("SLOW"):
            if run.step == 2:
                tell("spawn")
            time.sleep(0.2)


def train_model(member: str, step: int) -> Any:
    torch.manual_seed(3)
    net = Net()
    model = px.Model(net, nn.CrossEntropyLoss(), torch.optim.AdamW(net.parameters(), lr=0.01), metrics={"acc1"})
    data = TensorDataset(*images())
    model.train(
        EPOCHS, data, callbacks=[Loses(member, step), Spawns()], global_batch=GLOBAL, seed=5
    )
    return digest(net), model.eval(data)["acc1"]


def test_a_model_goes_on_without_a_lost_rank() -> None:
    env = {"PHALANX_REPLICAS": str(REPLICAS)}
    ((expected, accuracy),) = run_ranks(train_model, 1, "", 0, env=env)
    values = ElasticJob(train_model, "n0.1", 6, members=3, env=env).run()
    assert list(values.values()) == [(expected, accuracy)] * 2
    values = ElasticJob(train_model, "", 0, members=2, env={**env, "SLOW": "1"}).run()
    assert list(values.values()) == [(expected, accuracy)] * 3


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
    joined = job({"n0.0": (-1, "send")}, (2,), members=3, env={"SLOW": "1"})
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
    joined = job({"n0.1": (-1, "recovered")}, (2,), members=2, env={"SLOW": "1"})
    values = joined.run()
    assert {value[0] for value in values.values()} == {undisturbed}
    assert set(values) == {"n0.0", "n0.2"}
