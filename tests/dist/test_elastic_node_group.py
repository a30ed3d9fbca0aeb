"""Nodes of an elastic job in one process: connections, facts, ballots, and who may continue when some are lost."""

from __future__ import annotations

import contextlib
import logging
import select
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from phalanx.cluster.view import View
from phalanx.launch.elastic.membership import Membership, SizeLimits
from phalanx.launch.elastic.nodes import handshake, node_group
from phalanx.launch.elastic.nodes import mesh as mesh_module
from phalanx.launch.elastic.nodes.job_key import JobKey
from phalanx.launch.elastic.nodes.mesh import NodeMesh
from phalanx.launch.elastic.nodes.node_group import NodeGroup, NodePlace
from phalanx.launch.elastic.scaling import Scaling

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
                key=JobKey(key),
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


def test_a_greeting_comes_to_nodes_that_connect_later_and_again_where_a_connection_broke(
    nodes: Callable[..., Nodes],
) -> None:
    three = nodes()
    heard: list[tuple[int, int]] = []
    for node, group in three.groups.items():
        group.on_other = lambda sender, message, node=node: (
            heard.append((node, sender)) if "arrive" in message else None
        )
    three.run_until(lambda: three.groups[2].mesh.connected == {1}, among={1, 2})
    three.groups[2].greet({"arrive": {"capacity": 1, "store": "store2:1"}})
    three.run_until(lambda: three.are_connected() and len(heard) == 2)
    three.start()
    assert sorted(heard) == [(0, 2), (1, 2)]
    three.groups[0].mesh.drop(2, "the test wants it")  # it may have been before the greeting was read
    three.run_until(lambda: three.are_connected() and len(heard) == 3)
    assert heard[-1] == (0, 2)


def test_a_node_that_greets_again_does_not_undo_what_was_asked_for_since(nodes: Callable[..., Nodes]) -> None:
    three = nodes()
    three.start()
    scaling = Scaling(three.groups[0])
    scaling.welcome(2, 1, "store2:1")
    three.groups[0].scale({0: 1, 1: 1, 2: 0}, "scaled to 2 ranks")
    scaling.welcome(2, 1, "store2:1")
    assert three.groups[0].membership.targets == {0: 1, 1: 1, 2: 0}


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


def test_a_node_outside_the_view_gives_up_once_all_nodes_of_it_are_silent(nodes: Callable[..., Nodes]) -> None:
    three = nodes()
    three.start()
    three.groups[0].record("lose", "n0.0", "rank 0 was killed")
    three.run_until(lambda: all(len(views) == 2 for views in three.views.values()))
    alone = three.groups[0]  # its next rank would join
    alone.mesh.drop(1, "silence")
    alone.update(time.monotonic())
    assert not alone.membership.refusal
    alone.mesh.drop(2, "silence")
    alone.update(time.monotonic())
    assert alone.membership.refusal == (
        "host1 (node 1) is gone or cut off: silence; host2 (node 2) is gone or cut off: silence: nobody is left whom "
        "node 0 could join. If the job runs on without it, start this node again once it reaches the others"
    )


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


STRANGE = [
    b"[" * 100_000,
    b'{"hello": {"node": Infinity}}',
    b'{"hello": {"node": 1, "nonce": "x", "listens": ["127.0.0.1", 99999], "launch": ""}}',
    b'{"hello": {"node": "x"}}',
    b'{"knock": {"node": 77, "listens": ["127.0.0.1", 1]}}',
    b'{"knock": {"node": 0, "listens": ["127.0.0.1", 99999], "launch": "", "proof": ""}}',
    b'{"knock": {"node": 0, "listens": ["localhost", 1], "launch": "", "proof": ""}}',
    b'{"knock": {"node": 0, "listens": ["127.0.0.1", 1e999], "launch": "", "proof": ""}}',
    b'{"knock": {"node": 0, "listens": ["127.0.0.1", 1], "launch": "", "proof": "\\ud800"}}',
    b"GET / HTTP/1.0",
    b"[1]",
    b'{"proof": 3}',
]


def test_what_is_no_message_of_a_launcher_does_no_harm(nodes: Callable[..., Nodes]) -> None:
    two = nodes(2)
    two.groups[1].mesh._nodes[0].next_dial = float("inf")  # it is told where node 0 is by strangers only
    node_0 = two.groups[0].mesh.addresses[0]
    with contextlib.ExitStack() as stack:
        for line in STRANGE:
            stranger = stack.enter_context(socket.create_connection(two.groups[1].mesh.addresses[1]))
            stranger.sendall(line + b"\n")
            has_fields = line.startswith(b'{"')
            two.run_until(lambda end=stranger, awaited=has_fields: not awaited or _is_closed(end), among={1})
        assert two.groups[1].mesh._nodes[0].address == node_0
        assert two.groups[1].mesh.status(0) == "unknown"
        two.groups[1].mesh._nodes[0].next_dial = 0.0
        two.start()
    for message in ({"fact": ["explode"]}, {"accept": []}, {}, {"fact": ["scale", [[0, float("inf")]], "", [9]]}):
        two.groups[1].mesh.send(0, message)
    two.groups[1].record("lose", "n1.0", "killed")
    two.run_until(lambda: len(two.views[0]) == 2)


def _is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1 << 16) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_connections_that_say_nothing_are_closed_once_there_are_many(nodes: Callable[..., Nodes]) -> None:
    two = nodes(2)
    mesh = two.groups[0].mesh
    with contextlib.ExitStack() as stack:
        for _ in range(2 * handshake.SPARE_HANDSHAKES):
            stack.enter_context(socket.create_connection(mesh.addresses[0]))
            two.run_until(lambda: not select.select([mesh.listening], [], [], 0)[0], among={0})
        assert len(mesh._handshakes.pending) == handshake.SPARE_HANDSHAKES + 2
        two.start()


def test_a_break_that_a_send_finds_is_a_broken_connection_and_is_dialled_again(nodes: Callable[..., Nodes]) -> None:
    two = nodes(2)
    two.start()
    mesh = two.groups[0].mesh
    channel = mesh._nodes[1].channel
    assert channel is not None
    channel.close()  # as `flush` does when the other end is gone
    mesh.update(time.monotonic())
    assert mesh.status(1) == "broken"
    two.groups[0].record("lose", "n1.0", "killed")
    two.run_until(lambda: len(two.views[1]) == 2)


def test_the_node_that_is_left_of_two_goes_on_whoever_noticed_the_end_of_the_other(
    nodes: Callable[..., Nodes],
) -> None:
    two = nodes(2)
    two.start()
    old = two.groups.pop(0).mesh
    for handle in [peer.channel.socket for peer in old._nodes.values() if peer.channel is not None]:
        assert handle is not None
        handle.close()  # killed: no goodbye
    assert old.listening is not None
    old.listening.close()
    channel = two.groups[1].mesh._nodes[0].channel
    assert channel is not None
    channel.close()
    two.run_until(lambda: len(two.views[1]) == 2, timeout_s=2.0)
    assert two.ids(1)[-1] == (1, ("n1.0",))
    old.listening = None


def test_a_node_whose_address_is_not_known_yet_is_neither_lost_nor_a_reason_to_fail(
    nodes: Callable[..., Nodes],
) -> None:
    mesh = nodes().groups[1].mesh
    del mesh._nodes[2]
    assert (mesh.status(2), mesh.why(2)) == ("unknown", "")
    mesh.drop(2, "it did not answer")
    assert mesh.status(2) == "unknown"


def test_a_node_that_refused_connections_before_its_launcher_began_is_not_lost(nodes: Callable[..., Nodes]) -> None:
    three = nodes()
    late = three.groups[2].mesh._nodes[1]
    with socket.create_server(("127.0.0.1", 0)) as closed:
        late.address = closed.getsockname()
    three.run_until(lambda: three.groups[2].mesh.status(1) == "gone", among={2})
    three.groups[2].start(["n0.0", "n1.0", "n2.0"])
    assert three.groups[2].membership.refusal == ""
    three.start()


def test_a_node_that_was_met_and_ends_before_the_job_has_started_ends_it(nodes: Callable[..., Nodes]) -> None:
    two = nodes(2)
    two.run_until(two.are_connected)
    two.groups.pop(1).mesh.close()
    two.run_until(lambda: two.groups[0].mesh.status(1) in ("left", "gone"))
    two.groups[0].start(["n0.0", "n1.0"])
    assert two.groups[0].membership.refusal == "host1 (node 1) was lost before the job had started"


def test_facts_that_a_connection_lost_while_the_job_started_come_with_the_next(nodes: Callable[..., Nodes]) -> None:
    two = nodes(2)
    two.run_until(two.are_connected)
    for group in two.groups.values():
        for peer in group.mesh._nodes.values():
            assert peer.channel is not None
            peer.channel.close()
    for node, group in two.groups.items():
        group.record("add", {"id": f"n{node}.0", "host": f"host{node}", "pid": 1, "log": "", "node": node})
    two.run_until(lambda: all(len(group.membership.members) == 2 for group in two.groups.values()))


def test_a_node_that_is_taken_away_gets_no_ranks_until_another_launcher_is_there(nodes: Callable[..., Nodes]) -> None:
    two = nodes(2)
    two.start()
    two.groups[1].drain()
    two.run_until(lambda: two.groups[0].membership.targets == {0: 1, 1: 0})
    assert two.groups[0].is_draining(1)
    two.groups[0].mesh._nodes[1].launch = "another"
    assert not two.groups[0].is_draining(1)


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
