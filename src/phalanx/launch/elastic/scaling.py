"""`Scaling`: how many ranks each node of an elastic job should have, by command and as nodes come and go."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.errors import LaunchError
from phalanx.launch.elastic.membership import distribute_ranks
from phalanx.launch.elastic.nodes.node_group import NodeGroup, NodePlace


@dataclass
class Scaling:
    """One node's part in it."""

    group: NodeGroup
    is_closed: bool = False
    """Whether the job ends."""

    def __post_init__(self) -> None:
        self._node, self._membership = self.group.node, self.group.membership
        self._welcomed: set[str] = set()
        """Launches of nodes that came later."""

    def scale(self, size: int) -> str:
        """Change how many ranks the job should have; returns what follows, in words.

        Raises:
            LaunchError: If the job may not have that many, or is about to end.
        """
        limits = self._membership.limits
        if not limits.least <= size <= limits.most:
            raise LaunchError(
                f"{size} ranks were asked for, but the job was started with {limits.least} to {limits.most}. "
                "Give a number in that range."
            )
        if self._membership.view is None or self._membership.has_finished or self.is_closed:
            raise LaunchError("The job is starting or about to end, so its ranks stay as they are.")
        before = sum(self._membership.targets.values())
        self.group.scale(distribute_ranks(size, self._live_capacity), f"scaled to {size} ranks")
        return f"{before} ranks -> {size} ranks" if before != size else f"the job has {size} ranks already"

    @property
    def _live_capacity(self) -> dict[int, int]:
        """Most ranks of each node that can be reached: none where it is about to be taken away."""
        live = {node: self.group.places[node] for node in self.group.places.keys() & self.group.mesh.connected}
        live[self._node] = self.group.places[self._node]
        return {node: 0 if self.group.is_draining(node) else own.capacity for node, own in live.items()}

    # Nodes that come.

    def arrive(self) -> None:
        """Tell the nodes of a job that runs what this one brings."""
        own = self.group.places[self._node]
        # The one that decides may not be connected yet.
        self.group.greet({"arrive": {"capacity": own.capacity, "store": own.store}})

    def welcome(self, node: int, capacity: int, store: str) -> None:
        """Take in a node that comes later; what it says again, as its connection broke, changes nothing."""
        launch = self.group.mesh.launch(node)
        if launch in self._welcomed:
            return
        self._welcomed.add(launch)
        self.group.places[node] = NodePlace(capacity, store)
        if self.group.is_coordinator and not self.is_closed:
            others = sum(size for other, size in self._membership.targets.items() if other != node)
            size = min(self._membership.limits.most, others + capacity)
            self.group.scale(distribute_ranks(size, self._live_capacity), f"node {node} is there")

    # Members and nodes that leave.

    def leave(self, member_id: str, reason: str) -> None:
        """Let a member of this node leave."""
        targets = dict(self._membership.targets)
        if sum(targets.values()) > self._membership.limits.least:
            targets[self._node] -= 1
        self.group.record("depart", [member_id], reason or "by its own wish")
        self.group.scale(targets, "as before")

    @property
    def may_drain(self) -> bool:
        """Whether the other nodes can continue without this one."""
        members = self._membership.members
        others = [i for i in self._membership.active if members[i].node != self._node]
        stay = [i for i in others if i not in self._membership.departures]
        return bool(stay) and len(stay) >= self._membership.limits.least and not self._membership.has_finished

    @property
    def is_deserted(self) -> bool:
        """Whether every rank of the job is to leave."""
        active = self._membership.active
        return bool(active) and all(i in self._membership.departures for i in active)

    def drain(self) -> None:
        """Have the ranks of this node leave: it is about to be taken away."""
        self.group.drain()

    def keep_draining(self) -> None:
        """Undo what a node decided that did not know yet that this one is about to be taken away."""
        if self._membership.targets.get(self._node) and self.group.is_draining(self._node):
            self.group.drain()
