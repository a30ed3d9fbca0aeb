"""The launchers of an elastic job meet: who is told what, where only the first node's address was given."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from phalanx.errors import PeerLostError
from phalanx.launch.elastic.nodes.job_key import JobKey
from phalanx.launch.elastic.nodes.mesh import NodeMesh
from phalanx.launch.job.elastic_meeting import ElasticMeeting
from phalanx.launch.job.elastic_start import ElasticStart
from phalanx.launch.job.fork_server_handle import ForkServerHandle
from phalanx.launch.process.linux import StopSignals
from phalanx.launch.request.elastic import ElasticRange
from phalanx.launch.request.nodes import Nodes
from phalanx.launch.request.request import LaunchRequest
from phalanx.launch.request.topology import NodeOffer


def offer_of(node: int) -> NodeOffer:
    address = f"127.0.0.{node + 2}"
    return NodeOffer(
        node_rank=node,
        address=address,
        hostname=f"host{node}",
        endpoints={"worker": [f"{address}:{7000 + node}"]},
        job_id=f"job{node}",
        store_port=8000 + node,
    )


class NoStops:
    """Signals that never come."""

    def take(self) -> int:
        return 0


class QuietServer:
    """A fork server that says nothing."""

    def __init__(self) -> None:
        self.socket, self._other = socket.socketpair()

    def close(self) -> None:
        self.socket.close()
        self._other.close()


class Meetings:
    """Launchers that meet, and bare ends of a mesh that play the part of others."""

    def __init__(self) -> None:
        with socket.create_server(("", 0)) as probe:  # free on the addresses of all nodes
            self.port = int(probe.getsockname()[1])
        self._server = QuietServer()
        self.meshes: list[NodeMesh] = []

    def request(self, node: int, count: int) -> LaunchRequest:
        nodes = Nodes(("127.0.0.2",), count, node, f"127.0.0.{node + 2}")  # --nnodes COUNT --master-addr 127.0.0.2
        elastic = ElasticRange(least_ranks=1, most_ranks=count, least_nodes=count)
        return LaunchRequest(mode="collective", nodes=nodes, port=self.port, counts={"worker": 1}, elastic=elastic)

    def meeting(self, node: int, count: int = 3, key: bytes = b"secret", timeout_s: float = 5.0) -> ElasticMeeting:
        request = self.request(node, count)
        meeting = ElasticMeeting(request=request, timeout_s=timeout_s, offer=offer_of(node), key=key)
        self.meshes.append(meeting.mesh)
        return meeting

    def run(self, meeting: ElasticMeeting) -> int:
        return meeting.run(cast(StopSignals, NoStops()), cast(ForkServerHandle, self._server))

    def first_node(self, **more: Any) -> NodeMesh:
        """Node 0, as far as others see it."""
        mesh = NodeMesh(
            node=0,
            addresses={0: ("127.0.0.2", self.port)},
            node_count=3,
            listening=socket.create_server(("127.0.0.2", self.port)),
            key=JobKey(b"secret"),
            hello=lambda: {"offer": offer_of(0).to_json(), "addresses": [[0, ["127.0.0.2", self.port]]]},
            **more,
        )
        self.meshes.append(mesh)
        return mesh

    def close(self) -> None:
        self._server.close()
        for mesh in self.meshes:
            mesh.close()


@pytest.fixture
def meetings() -> Iterator[Meetings]:
    made = Meetings()
    yield made
    made.close()


def serve(mesh: NodeMesh, until: Callable[[], object], timeout_s: float = 5.0) -> None:
    """Let one end of a mesh work until something is true."""
    deadline = time.monotonic() + timeout_s
    while not until():
        assert time.monotonic() < deadline, "it did not come"
        with selectors.DefaultSelector() as ready:
            mesh.register(ready)
            for key, _ in ready.select(0.01):
                key.data()
        mesh.update(time.monotonic())


def test_a_node_that_never_heard_of_the_last_one_begins_with_it(meetings: Meetings) -> None:
    meeting = meetings.meeting(1)
    first = meetings.first_node()
    first.on_connect = lambda node, _: first.send(node, {"form": [offer_of(n).to_json() for n in range(3)]})
    thread = threading.Thread(target=serve, args=(first, lambda: meeting.offers))
    thread.start()
    assert meetings.run(meeting) == 0
    thread.join()
    start = ElasticStart(request=meetings.request(1, 3), offer=meeting.offer, meeting=meeting)
    start.group.start(start.initial)
    assert not start.group.membership.refusal
    assert meeting.mesh.status(2) == "unknown"
    assert meeting.mesh.addresses[2] == ("127.0.0.4", meetings.port)


def test_a_form_that_was_lost_with_its_connection_comes_with_the_next(meetings: Meetings) -> None:
    meeting, other = meetings.meeting(0), meetings.meeting(1)
    for node in (0, 1):
        meetings.meshes[node].node_count = 2
    meeting.offers = [offer_of(0), offer_of(1)]  # node 0 has begun; node 1 was not told
    group = ElasticStart(request=meetings.request(0, 2), offer=meeting.offer, meeting=meeting).group
    thread = threading.Thread(target=serve, args=(group.mesh, lambda: other.offers))
    thread.start()
    assert meetings.run(other) == 0
    thread.join()
    assert [offer.node_rank for offer in other.offers] == [0, 1]


def test_a_launcher_that_takes_the_place_of_one_is_not_part_of_what_that_one_began(meetings: Meetings) -> None:
    meeting = meetings.meeting(1)
    old = {**offer_of(1).to_json(), "store_port": 1234}
    meeting.mesh.on_message(0, {"form": [offer_of(0).to_json(), old]})
    assert not meeting.offers
    meeting.mesh.on_message(0, {"state": {"view": None}})
    assert not meeting.remote_state


def test_another_secret_is_what_both_nodes_name(meetings: Meetings, caplog: pytest.LogCaptureFixture) -> None:
    first = meetings.meeting(0, 2, key=b"one", timeout_s=1.2)
    second = meetings.meeting(1, 2, key=b"another", timeout_s=1.2)
    errors: list[str] = []

    def run(meeting: ElasticMeeting) -> None:
        with pytest.raises(PeerLostError) as caught:
            meetings.run(meeting)
        errors.append(str(caught.value))

    thread = threading.Thread(target=run, args=(second,))
    thread.start()
    run(first)
    thread.join()
    for name in ("node 1 (127.0.0.3)", "node 0 (127.0.0.2)"):
        assert f"{name} came with another PHALANX_JOB_SECRET. Set the same value on every node." in errors
    warnings = [record.getMessage() for record in caplog.records if "does not know" in record.getMessage()]
    assert sorted(warnings) == [
        f"a launcher at 127.0.0.{node + 2} that says it is node {node} does not know this job's PHALANX_JOB_SECRET; it "
        "is refused"
        for node in (0, 1)
    ]


@pytest.mark.parametrize("message", [{"state": {}}, {"state": 3}, {"form": None}, {"form": [], "x": 1}, {}])
def test_what_is_no_message_of_this_version_does_not_end_the_meeting(
    meetings: Meetings, message: dict[str, Any]
) -> None:
    meeting = meetings.meeting(1)
    meeting.mesh.on_message(0, message)
    assert not meeting.offers
    assert not meeting.remote_state
