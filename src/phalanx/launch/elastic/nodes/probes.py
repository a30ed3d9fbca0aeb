"""`NodeProbes`: the launchers of an elastic job observe their ranks at one moment, and each learns what all saw.

probe      number, epoch           every node of the view is to observe its ranks
observed   number, epoch, seen     what a node saw

Any launcher asks, and none collects for the others: a launcher that has heard every node of the view has them all. The
next probe has the number after the highest that was heard, so that two launchers that ask at one moment ask for the
same probe, and every launcher completes probes in the same order. What comes for another membership epoch is left out.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from phalanx.launch.elastic.nodes.node_group import NodeGroup

UNDER_WAY_S = 5.0
"""For how long nobody asks again for a probe that is not complete."""

_MAX_PROBES = 1 << 20
"""Numbers that belong to one membership epoch."""

_MAX_OPEN = 4
"""How many probes that are not complete are kept."""


@dataclass
class NodeProbes:
    """One node's part in the probes of all."""

    group: NodeGroup
    receive_probe: Callable[[dict[str, Any]], None]
    """Called with `probe` when the ranks of this node are to be observed, and with `everywhere` when all nodes did."""

    _unsent: queue.SimpleQueue[dict[str, Any]] = field(default_factory=queue.SimpleQueue)
    _number: int = 0
    """The highest that was heard."""

    _began_at: float = float("-inf")
    _epoch: int = -1
    _seen: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)
    """By probe and node, of the epoch in use."""

    # From any thread.

    def request_probe(self) -> None:
        """Have the launchers of all nodes observe their ranks, this one too."""
        self._unsent.put({"ask": True})

    def publish_probe(self, number: int, observed: dict[str, Any]) -> None:
        """Tell the others what was seen here in a probe."""
        self._unsent.put({"number": number, "seen": observed})

    # From the thread that serves the connections.

    def update(self) -> None:
        """Send what was asked and seen here."""
        self._follow_view()
        while not self._unsent.empty():
            message = self._unsent.get()
            if "ask" in message:
                self._ask()
            elif message["number"] in self._seen:  # else it is of another epoch
                self.group.broadcast({"observed": {**message, "epoch": self._epoch}})
                self._add(message["number"], self.group.node, message["seen"])

    def take(self, node: int, message: dict[str, Any]) -> None:
        """Take a message of another node."""
        self._follow_view()
        body = message["probe"] if "probe" in message else message["observed"]
        number = int(body["number"])
        if body["epoch"] != self._epoch or number // _MAX_PROBES != self._epoch or node not in self._nodes:
            return
        self._begin(number)  # what was seen may come before the question, which another node has asked
        if "observed" in message:
            self._add(number, node, body["seen"])

    def _follow_view(self) -> None:
        view = self.group.membership.view
        epoch = -1 if view is None else view.epoch
        if epoch != self._epoch:
            self._epoch, self._number, self._began_at = epoch, epoch * _MAX_PROBES, float("-inf")
            self._seen.clear()

    @property
    def _nodes(self) -> set[int]:
        """Those that have ranks in the view."""
        view = self.group.membership.view
        return set() if view is None else {member.node for member in view.members}

    def _ask(self) -> None:
        if self.group.node in self._nodes and time.monotonic() > self._began_at + UNDER_WAY_S:
            self.group.broadcast({"probe": {"number": self._number + 1, "epoch": self._epoch}})
            self._begin(self._number + 1)

    def _begin(self, number: int) -> None:
        """Observe here too, where this probe is new."""
        if number > self._number:
            self._number, self._began_at = number, time.monotonic()
            self._seen = {
                open_number: nodes for open_number, nodes in self._seen.items() if number - open_number < _MAX_OPEN
            }
            self._seen[number] = {}
            if self.group.node in self._nodes:
                self.receive_probe({"probe": number})

    def _add(self, number: int, node: int, seen: dict[str, Any]) -> None:
        if number not in self._seen:
            return
        self._seen[number][node] = seen
        if self._nodes <= self._seen[number].keys() and self.group.node in self._nodes:
            everywhere = [self._seen[number][each] for each in sorted(self._nodes)]
            self._seen = {later: nodes for later, nodes in self._seen.items() if later > number}
            self._began_at = float("-inf")
            self.receive_probe({"everywhere": everywhere, "probe": number})
