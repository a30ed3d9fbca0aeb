"""Nodes of an elastic job in one process: connections, facts, ballots, and who may go on when some are lost."""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from phalanx.cluster.view import View
from phalanx.launch.elastic import mesh as mesh_module
from phalanx.launch.elastic import node_group
from phalanx.launch.elastic.membership import Membership, SizeLimits
from phalanx.launch.elastic.mesh import NodeMesh
from phalanx.launch.elastic.node_group import NodeGroup, NodePlace

pytestmark = pytest.mark.dist


class Nodes:
    """Node groups on loopback addresses, each with the views it was told."""

    def __init__(self, keys: list[bytes]) -> None:
        listening = [socket.create_server(("127.0.0.1", 0)) for _ in keys]
        addresses: dict[int, tuple[str, int]] = {n: s.getsockname() for n, s in enumerate(listening)}
        self.groups: dict[int, NodeGroup] = {}
        self.views: dict[int, list[View]] = {}
        for node, key in enumerate(keys):
            mesh = NodeMesh(
                node=node,
                addresses=dict(addresses),
                node_count=len(keys),
                listening=listening[node],
                key=key,
                hello=dict,
            )
            views: list[View] = []
            self.groups[node], self.views[node] = (
                NodeGroup(
                    mesh=mesh,
                    membership=Membership(SizeLimits(1, 8)),
                    places={n: NodePlace(1, f"store{n}:1") for n in range(len(keys))},
                    job_id="job",
                    names=tuple(f"host{n}" for n in range(len(keys))),
                    on_view=views.append,
                ),
                views,
            )

    def run_until(self, look: Callable[[], Any], *, among: set[int] | None = None, timeout_s: float = 5.0) -> None:
        """Let nodes work until `look` is true; others stand still."""
        deadline = time.monotonic() + timeout_s
        active = [group for node, group in self.groups.items() if among is None or node in among]
        while not look():
            assert time.monotonic() < deadline, "it did not come"
            with selectors.DefaultSelector() as ready:
                for group in active:
                    group.mesh.register(ready)
                for key, _ in ready.select(0.01):
                    key.data()
            for group in active:
                group.mesh.update(time.monotonic())
                group.update(time.monotonic())

    def are_connected(self) -> bool:
        return all(len(group.mesh.connected) == len(self.groups) - 1 for group in self.groups.values())

    def start(self) -> None:
        """Connect all, and begin with one member each."""
        self.run_until(self.are_connected)
        ids = [f"n{node}.0" for node in self.groups]
        for node, group in self.groups.items():
            group.record("add", {"id": ids[node], "host": f"host{node}", "pid": 1, "log": "", "node": node})
        self.run_until(lambda: all(len(group.membership.members) == len(ids) for group in self.groups.values()))
        for group in self.groups.values():
            group.start(ids)
        self.run_until(lambda: all(self.views.values()))

    def ids(self, node: int) -> list[tuple[int, tuple[str, ...]]]:
        return [(view.epoch, view.ids) for view in self.views[node]]


@pytest.fixture
def nodes(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[..., Nodes]]:
    caplog.set_level(logging.INFO, "phalanx.launch")
    made: list[Nodes] = []

    def make(count: int = 3, keys: list[bytes] | None = None) -> Nodes:
        made.append(Nodes(keys or [b"secret"] * count))
        return made[-1]

    yield make
    for group in [group for each in made for group in each.groups.values()]:
        group.mesh.close()


def test_a_fact_of_one_node_makes_the_same_view_on_all(nodes: Callable[..., Nodes]) -> None:
    three = nodes()
    three.start()
    three.groups[2].record("lose", "n2.0", "rank 2 was killed")
    three.run_until(lambda: all(len(views) == 2 for views in three.views.values()))
    assert three.ids(0) == three.ids(1) == three.ids(2) == [(0, ("n0.0", "n1.0", "n2.0")), (1, ("n0.0", "n1.0"))]
    assert three.views[1][1].store == "store0:1"


def test_the_next_node_takes_over_from_a_coordinator_that_ended(nodes: Callable[..., Nodes]) -> None:
    three = nodes()
    three.start()
    three.groups.pop(0).mesh.close()
    three.run_until(lambda: all(len(three.views[node]) == 2 for node in (1, 2)))
    assert three.ids(1) == three.ids(2)
    view = three.views[1][1]
    assert (view.ids, view.store, view.reason) == (("n1.0", "n2.0"), "store1:1", "host0 (node 0) has ended")


def test_most_nodes_go_on_without_one_that_is_silent_and_it_cannot_go_on_alone(
    nodes: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh_module, "BEAT_S", 0.05)
    monkeypatch.setattr(mesh_module, "LOST_AFTER_S", 0.6)
    three = nodes()
    three.start()
    three.run_until(lambda: len(three.views[1]) == 2, among={1, 2})
    assert three.ids(1) == [(0, ("n0.0", "n1.0", "n2.0")), (1, ("n1.0", "n2.0"))]
    # The other two are silent to it as well.
    alone = three.groups[0]
    alone.mesh.drop(1, "silence")
    alone.mesh.drop(2, "silence")
    alone.update(time.monotonic())
    assert "node 0 is cut off: of nodes [0, 1, 2] it reaches [0] only" in alone.membership.refusal
    assert len(three.views[0]) == 1


def test_a_node_that_does_not_vote_is_left_out(nodes: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_group, "BALLOT_S", 0.3)
    four = nodes(4)
    four.start()
    # Node 3 stands still while the others agree without node 2; it is dropped only where its vote is needed.
    four.groups[0].record("lose", "n2.0", "killed")
    four.run_until(lambda: len(four.views[0]) == 2, among={0, 1, 2})
    assert four.ids(0)[-1] == (1, ("n0.0", "n1.0", "n3.0"))
    four.groups[0].record("lose", "n1.0", "killed")
    four.run_until(lambda: len(four.views[0]) == 3, among={0, 1})
    four.groups[0].record("depart", ["n0.0"], "it wants to")
    four.run_until(four.are_connected)
    four.run_until(lambda: four.views[3][-1].epoch == four.views[0][-1].epoch)
    assert four.views[3][-1] == four.views[0][-1]


def test_a_launcher_with_another_secret_is_not_let_in(
    nodes: Callable[..., Nodes], caplog: pytest.LogCaptureFixture
) -> None:
    two = nodes(keys=[b"one", b"another"])
    two.run_until(lambda: "does not know this job's PHALANX_JOB_SECRET" in caplog.text)
    assert not two.groups[0].mesh.connected
    assert not two.groups[1].mesh.connected


def test_what_is_no_message_of_a_launcher_does_no_harm(nodes: Callable[..., Nodes]) -> None:
    two = nodes(2)
    stranger = socket.create_connection(two.groups[0].mesh.addresses[0])
    with stranger:
        stranger.sendall(b'{"knock": {"node": 77, "listens": ["127.0.0.1", 1]}}\n')
        stranger.sendall(b'GET / HTTP/1.0\r\n\r\n{"hello": {"node": "x"}}\n[1]\n{"proof": 3}\n')
        two.start()
    two.groups[1].mesh.send(0, {"fact": ["explode"]})
    two.groups[1].mesh.send(0, {"accept": []})
    two.groups[1].record("lose", "n1.0", "killed")
    two.run_until(lambda: len(two.views[0]) == 2)


def test_a_node_that_comes_later_learns_everything(nodes: Callable[..., Nodes]) -> None:
    three = nodes()
    late = three.groups.pop(2)
    late_views = three.views.pop(2)
    three.start()
    three.groups[0].record("lose", "n1.0", "killed")
    three.run_until(lambda: len(three.views[0]) == 2)
    three.groups[2], three.views[2] = late, late_views
    three.run_until(lambda: late_views)
    assert late.membership.view == three.groups[0].membership.view
    assert late.membership.gone == {"n1.0": "killed"}


def test_a_launcher_that_takes_the_place_of_another_has_none_of_its_members(nodes: Callable[..., Nodes]) -> None:
    two = nodes(2)
    two.start()
    old = two.groups[1]
    # Killed and started again before the other could notice: something listens at its port all the time.
    fresh = nodes(2)
    mesh = fresh.groups[1].mesh
    mesh.addresses = {0: two.groups[0].mesh.addresses[0], 1: mesh.addresses[1]}
    mesh.__post_init__()
    for channel in [peer.channel for peer in old.mesh._nodes.values()]:
        channel.close()
    two.groups[1], two.views[1] = fresh.groups[1], fresh.views[1]
    two.run_until(lambda: two.views[1])
    two.run_until(lambda: len(two.views[0]) == 2)
    assert two.views[0][1].reason == "host1 (node 1) was started again"
    assert two.ids(0)[-1] == (1, ("n0.0",))
    old.mesh.close()
