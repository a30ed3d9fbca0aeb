"""The part of a rank in an elastic job that needs no other process: views, shares of lost replicas, state of peers."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cluster.view import View
from phalanx.comm.batch.replicas import Replicas, ReplicaTurn, assign_replicas
from phalanx.comm.elastic.membership import MembershipClient
from phalanx.comm.elastic.shared_state import collect_state, end_sharing, load_state, share_with_joiners
from phalanx.errors import ConfigError, PeerLostError
from phalanx.parallel.data.replicas.replica_sums import PartialSums
from phalanx.parallel.elastic.progress import share_out


def view(epoch: int, *ids: str, planned: bool = False) -> dict[str, object]:
    members = [{"id": id, "host": "h", "pid": 1, "log": "", "node": 0} for id in ids]
    return {
        "epoch": epoch,
        "members": members,
        "store": "h:1",
        "reason": "r",
        "planned": planned,
    }


@pytest.fixture
def connected() -> Iterator[tuple[MembershipClient, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield MembershipClient(ours, "n0.1", patience_s=0.1), theirs


def tell(launcher: socket.socket, **message: object) -> None:
    launcher.sendall(json.dumps(message).encode() + b"\n")


@given(st.integers(1, 24), st.data())
def test_lost_replicas_are_shared_out_and_every_rank_has_something_to_do(count: int, data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, count))
    everyone = assign_replicas(count, ranks)
    left = data.draw(st.lists(st.sampled_from(everyone), min_size=1, max_size=ranks, unique=True))
    shares = share_out(left, count)
    assert set().union(*shares) == set(range(count))
    for before, after in zip(left, shares, strict=True):
        assert after[: len(before)] == tuple(before)
        assert len(after) > len(before)
        extra = after[len(before) :]
        assert extra == (before[-1],) or not set(extra) & set(before)


@given(st.integers(1, 16), st.randoms(use_true_random=False))
def test_partial_sums_have_the_same_bits_in_any_order(count: int, order: object) -> None:
    values = torch.randn(count, 5, generator=torch.Generator().manual_seed(count)) * 1e4
    results = []
    for replicas in (list(range(count)), order.sample(range(count), count)):  # type: ignore[attr-defined]
        sums = PartialSums(count)
        for replica in replicas:
            assert not sums.has(replica)
            sums.add(range(replica, replica + 1), values[replica].clone())
            assert sums.has(replica)
        ((run, total),) = sums.sums
        assert run == range(count)
        results.append(total)
    assert torch.equal(*results)


def test_a_view_of_those_that_were_there() -> None:
    read = View.from_json(view(4, "a", "b", "c"))
    assert read.ids == ("a", "b", "c")
    assert read.part([0, 2]).ids == ("a", "c")
    assert read.part([1]).epoch == 4


def test_a_loss_is_an_error_and_a_planned_change_is_not(connected: tuple[MembershipClient, socket.socket]) -> None:
    membership, launcher = connected
    tell(launcher, view=view(0, "n0.0", "n0.1", "n0.2"))
    membership.await_start()
    assert membership.view is not None
    tell(launcher, view=view(1, "n0.0", "n0.1", "n0.2", "n0.3", planned=True))
    membership.check()
    tell(launcher, view=view(2, "n0.0", "n0.1"))
    with pytest.raises(PeerLostError, match="continues without it"):
        membership.check()
    newest = membership.await_newer(0)
    assert newest is not None
    assert newest.epoch == 2
    membership.use(newest)
    membership.check()


def test_messages_may_come_in_pieces(connected: tuple[MembershipClient, socket.socket]) -> None:
    membership, launcher = connected
    text = json.dumps({"view": view(0, "n0.1")}).encode() + b"\n"
    launcher.sendall(text[:20])
    membership.receive()
    assert membership.view is None
    launcher.sendall(text[20:])
    membership.receive()
    assert membership.view is not None


def test_a_rank_is_suspected_after_a_usual_step_and_the_patience(
    connected: tuple[MembershipClient, socket.socket],
) -> None:
    membership, launcher = connected
    tell(launcher, view=view(0, "n0.0", "n0.1"))
    membership.await_start()
    membership.suspect([0], waited_s=5.0)  # before it is known what is usual
    for _ in range(3):
        membership.count_step(0.2)
    membership.suspect([0], waited_s=0.25)
    membership.suspect([0], waited_s=0.35)
    membership.suspect([0], waited_s=0.36)  # asked already
    launcher.settimeout(1.0)
    assert json.loads(launcher.recv(4096)) == {"suspect": {"epoch": 0, "ids": ["n0.0"], "waited_s": 0.35}}


def test_one_step_shows_what_is_usual_to_a_rank_that_has_just_joined(
    connected: tuple[MembershipClient, socket.socket],
) -> None:
    membership, launcher = connected
    tell(launcher, view=view(0, "n0.0", "n0.1"))
    membership.await_start()
    assert membership.usual_step_s + membership.patience_s == pytest.approx(30.0)
    assert membership.timed_step_s == 0.0
    membership.expect_step(1.5)  # as the others have timed them, where this rank has just joined
    assert membership.usual_step_s == pytest.approx(1.5)
    membership.count_step(0.2)
    assert membership.usual_step_s == pytest.approx(0.2)
    membership.count_step(0.5)
    assert membership.usual_step_s == pytest.approx(0.5)  # of two it is the longer one
    membership.count_step(0.3)
    membership.count_step(0.3)
    assert membership.usual_step_s == pytest.approx(0.3)


def test_a_launcher_that_is_gone_or_refuses_is_an_error(connected: tuple[MembershipClient, socket.socket]) -> None:
    membership, launcher = connected
    tell(launcher, refused={"why": "fewer ranks than the minimum"})
    with pytest.raises(PeerLostError, match="minimum"):
        membership.receive(1.0)
    launcher.close()
    with pytest.raises(PeerLostError):
        membership.receive(1.0)


def test_taken_over_replicas_belong_to_the_global_batch_at_hand() -> None:
    replicas = Replicas(assign_replicas(4, 2), 1, is_elastic=True)
    replicas.begin(ReplicaTurn(2, seed=1, index=0))
    replicas.begin_backward()
    replicas.begin(ReplicaTurn(3, seed=1, index=1))
    assert replicas.is_last
    replicas.take_over(((2, 3, 0, 1),), 0)
    assert not replicas.is_last
    assert list(replicas.local) == [2, 3, 0, 1]
    replicas.reassign(assign_replicas(4, 1), 0)
    assert list(replicas.local) == [0, 1, 2, 3]
    assert replicas.revision == 2


class Counts:
    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def test_a_rank_that_joins_in_a_training_that_the_others_have_ended_is_refused() -> None:
    kind = f"training {time.monotonic()}"
    over, live = Counts(1), Counts(2)
    share_with_joiners(kind, over)
    share_with_joiners(kind, live)
    end_sharing(over)
    state = collect_state()
    assert state[f"{kind}/0"] is None
    joiner = f"joiner {kind}"
    first = Counts(0)
    share_with_joiners(joiner, first)
    with pytest.raises(ConfigError, match=r"joins a job with its 1st joiner training .*: they have made 2"):
        load_state(state | {f"{joiner}/0": None, f"{joiner}/1": {"value": 2}})
    assert live.value == 2
    del first
    load_state({**state, f"{kind}/1": {"value": 3}, f"{joiner}/0": None})
    assert live.value == 3


def test_state_waits_for_an_object_that_is_made_later() -> None:
    kind = f"counts {time.monotonic()}"
    first = Counts(1)
    share_with_joiners(kind, first)
    state = collect_state()
    assert state[f"{kind}/0"] == {"value": 1}
    load_state({**state, f"{kind}/0": {"value": 5}, f"{kind}/1": {"value": 7}})
    second = Counts(0)
    share_with_joiners(kind, second)
    assert (first.value, second.value) == (5, 7)
