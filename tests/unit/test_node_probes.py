"""Launchers of an elastic job look at their ranks together: each learns what all saw, and none collects for others."""

from __future__ import annotations

from collections import deque
from typing import Any, cast

from phalanx.cluster.view import Member, View
from phalanx.launch.elastic.membership import Membership, SizeLimits
from phalanx.launch.elastic.nodes.node_group import NodeGroup
from phalanx.launch.elastic.nodes.probes import NodeProbes


def view(epoch: int, *nodes: int) -> View:
    members = tuple(Member(id=f"n{node}.0", host="h", pid=1, log="", node=node) for node in nodes)
    return View(epoch=epoch, members=members, store="h:1", reason="", planned=True)


class Group:
    """A node of a mesh whose messages are carried when the test says so."""

    def __init__(self, node: int, carried: dict[int, deque[tuple[int, dict[str, Any]]]]) -> None:
        self.node, self._carried = node, carried
        self.membership = Membership(SizeLimits(1, 4))

    def broadcast(self, message: dict[str, Any]) -> None:
        for node, messages in self._carried.items():
            if node != self.node:
                messages.append((self.node, message))


class Nodes:
    """Launchers with one rank each."""

    def __init__(self, *ranked: int, count: int = 3) -> None:
        self.carried: dict[int, deque[tuple[int, dict[str, Any]]]] = {node: deque() for node in range(count)}
        self.groups = [Group(node, self.carried) for node in range(count)]
        self.told: list[list[dict[str, Any]]] = [[] for _ in range(count)]
        self.probes = [
            NodeProbes(cast(NodeGroup, group), told.append) for group, told in zip(self.groups, self.told, strict=True)
        ]
        self.adopt(view(0, *ranked))

    def adopt(self, newer: View) -> None:
        for group in self.groups:
            group.membership.adopt(newer)

    def settle(self) -> None:
        """Carry messages until there are none; whoever is told to look says what it saw."""
        for probes in self.probes:
            probes.update()
        while any(self.carried.values()):
            for node, messages in self.carried.items():
                while messages:
                    self.probes[node].take(*messages.popleft())
            self.answer()

    def answer(self) -> None:
        for node, told in enumerate(self.told):
            for message in [message for message in told if "everywhere" not in message]:
                told.remove(message)
                self.probes[node].publish_probe(message["probe"], {"node": node})
            self.probes[node].update()

    def everywhere(self) -> list[list[Any]]:
        return [[message["everywhere"] for message in told if "everywhere" in message] for told in self.told]


SEEN = [{"node": node} for node in range(3)]


def test_every_launcher_learns_what_all_of_them_saw() -> None:
    nodes = Nodes(0, 1, 2)
    nodes.probes[2].request_probe()
    nodes.settle()
    assert nodes.everywhere() == [[SEEN], [SEEN], [SEEN]]
    nodes.probes[0].request_probe()
    nodes.settle()
    assert nodes.everywhere() == [[SEEN, SEEN]] * 3


def test_launchers_that_ask_at_one_moment_ask_for_one_probe() -> None:
    nodes = Nodes(0, 1, 2)
    for probes in nodes.probes:
        probes.request_probe()
    nodes.settle()
    assert nodes.everywhere() == [[SEEN]] * 3


def test_nobody_asks_again_while_a_look_is_under_way() -> None:
    nodes = Nodes(0, 1, 2)
    nodes.probes[0].request_probe()
    nodes.probes[0].update()
    nodes.probes[0].request_probe()
    nodes.settle()
    assert nodes.everywhere() == [[SEEN]] * 3


def test_a_node_without_ranks_is_not_waited_for_and_judges_nothing() -> None:
    nodes = Nodes(0, 2)
    nodes.probes[1].request_probe()
    nodes.settle()
    assert nodes.everywhere() == [[], [], []]
    nodes.probes[0].request_probe()
    nodes.settle()
    seen = [SEEN[0], SEEN[2]]
    assert nodes.everywhere() == [[seen], [], [seen]]


def test_what_was_seen_before_the_members_changed_is_left_out() -> None:
    nodes = Nodes(0, 1, 2)
    nodes.probes[0].request_probe()
    nodes.probes[0].update()
    nodes.probes[1].take(*nodes.carried[1].popleft())
    nodes.adopt(view(1, 0, 1))
    nodes.answer()
    nodes.settle()
    assert nodes.everywhere() == [[], [], []]
    nodes.probes[1].request_probe()
    nodes.settle()
    assert nodes.everywhere() == [[SEEN[:2]], [SEEN[:2]], []]
