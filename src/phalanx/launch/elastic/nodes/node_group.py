"""`NodeGroup`: one node of an elastic job among the others: tells what happens here, and agrees on views.

fact       [what, *values]            something happened to a member
state      all that a node knows      to a node that (re)connects
prepare, promise, accept, accepted    a ballot on the next view
decided    view                       its outcome
refuse     why                        the job cannot continue
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.cluster.view import View
from phalanx.launch.elastic import membership_state
from phalanx.launch.elastic.channel import UNREADABLE
from phalanx.launch.elastic.membership import Membership
from phalanx.launch.elastic.nodes.consensus import BallotNumber, ViewBallot, ViewVote, is_quorum
from phalanx.launch.elastic.nodes.job_key import parse_address
from phalanx.launch.elastic.nodes.mesh import NodeMesh

logger = logging.getLogger("phalanx.launch")

BALLOT_S = 1.0
"""How long a connected node may take to vote before it counts as cut off."""


@dataclass(frozen=True, slots=True)
class NodePlace:
    """What a node brings into a job."""

    capacity: int
    """Most ranks there."""

    store: str
    """`host:port` of its store, in which ranks may meet."""


@dataclass(kw_only=True)
class NodeGroup:
    """This node's part in what all nodes decide."""

    mesh: NodeMesh
    membership: Membership
    places: dict[int, NodePlace]
    """What each node has, as far as it is known here; of this one always."""

    job_id: str
    names: tuple[str, ...]
    """What to call each node in messages."""

    form: list[dict[str, Any]] = field(default_factory=list)
    """What the nodes that begin together bring, for one whose connection broke before it was told."""

    on_view: Callable[[View], None] = lambda _: None
    """Called with each view that was decided."""

    on_other: Callable[[int, dict[str, Any]], None] = lambda _node, _message: None
    """Called with messages of nodes that are not about membership itself."""

    _greeting: dict[str, Any] | None = None
    _vote: ViewVote = field(default_factory=ViewVote)
    _ballot: ViewBallot | None = None
    _ballot_until: float = 0.0
    _round: int = 0

    def __post_init__(self) -> None:
        self.node = self.mesh.node
        self.mesh.on_message = self.take
        self.mesh.on_connect = self._on_connect
        self.mesh.on_lost = self._on_lost
        self.mesh.on_restart = self._on_restart

    # What happens here.

    def record(self, what: str, *values: Any) -> bool:
        """Record a fact here and on every node."""
        fact = [what, *values]
        self.mesh.broadcast({"fact": fact})
        return membership_state.record_fact(self.membership, fact)

    def scale(self, targets: Mapping[int, int], reason: str) -> None:
        """Change how many ranks each node should have."""
        version = (self.membership.version[0] + 1, self.node)
        self.record("scale", [list(item) for item in targets.items()], reason, version)

    def drain(self) -> None:
        """Have all ranks of this node leave, and no more begin here: it is about to be taken away."""
        self.record("drain", self.mesh.launch(self.node))
        self.scale({**self.membership.targets, self.node: 0}, f"node {self.node} is about to be taken away")

    def is_draining(self, node: int) -> bool:
        """Return whether a node is about to be taken away."""
        return self.mesh.launch(node) in self.membership.draining

    def broadcast(self, message: dict[str, Any]) -> None:
        """Send something to every other node."""
        self.mesh.broadcast(message)

    def greet(self, message: dict[str, Any]) -> None:
        """Send something to every other node whenever it connects, so that none misses it: its connection may break.

        It may come to a node several times.
        """
        self._greeting = message
        self.mesh.broadcast(message)

    def start(self, initial: Sequence[str]) -> None:
        """Begin with view 0 once all its members have started; the lowest node says so."""
        nodes = {int(member_id[1:].partition(".")[0]) for member_id in initial}
        for node in nodes - {self.node} - self.mesh.connected:
            # One that refused connections before its launcher began was not lost: others have met it.
            was_met = bool(self.mesh.launch(node))
            if was_met and self.mesh.status(node) in ("gone", "left", "silent"):
                self.membership.refusal = f"{self.names[node]} (node {node}) was lost before the job had started"
        if self.node == min(nodes, default=-1) and all(i in self.membership.members for i in initial):
            view = self.membership.start(initial, self.places[self.node].store)
            # Nodes that came too late to begin with the others learn all from it.
            self.mesh.broadcast({"state": self._state()})
            self.on_view(view)

    @property
    def is_coordinator(self) -> bool:
        """Whether this node proposes views: the lowest of the last view's that live."""
        live = self.mesh.connected | {self.node}
        return self.node == min(live & self._voters, default=-1)

    @property
    def _voters(self) -> set[int]:
        view = self.membership.view
        return set() if view is None else {member.node for member in view.members}

    def update(self, now: float) -> None:
        """Lose members of nodes that are lost, and see to the next view."""
        if self.membership.view is None or self.membership.refusal or not self.is_coordinator:
            self._ballot = None
            self._refuse_without_voters()
            return
        self._lose_nodes()
        if self._ballot is not None:
            if now > self._ballot_until:
                self._drop_silent_voters()
        elif view := self.membership.next_view(self._stores):
            self._propose(view, now)

    def _refuse_without_voters(self) -> None:
        """Give up where all nodes of the last view are lost and this is none of them: nobody can let its ranks join."""
        voters = self._voters
        if not voters or self.node in voters or self.membership.refusal or self.membership.has_finished:
            return
        reasons = [f"{self.names[node]} (node {node}) {self.mesh.why(node)}" for node in sorted(voters)]
        if all(map(self.mesh.why, voters)):
            self.membership.refusal = (
                f"{'; '.join(reasons)}: nobody is left whom node {self.node} could join. If the job runs on without "
                "it, start this node again once it reaches the others"
            )

    def _lose_nodes(self) -> None:
        """Count the members of lost nodes as gone."""
        nodes = {self.membership.members[member_id].node for member_id in self._alive}
        for node in nodes - {self.node} - self.mesh.connected:
            why = self.mesh.why(node)
            if not why:
                continue  # not clear yet
            self._lose_members(node, why)

    @property
    def _alive(self) -> set[str]:
        return {*self.membership.active, *self.membership.joiners, *self.membership.leaving}

    def _lose_members(self, node: int, why: str) -> None:
        lost = sorted(i for i in self._alive if self.membership.members[i].node == node)
        for member_id in lost:
            self.record("lose", member_id, f"{self.names[node]} (node {node}) {why}")
        # Whoever notices it later must not undo what was decided since.
        if lost and self.membership.view is not None:
            self.scale({**self.membership.targets, node: 0}, "as before")

    def _on_restart(self, node: int) -> None:
        if self.membership.view is None and node in self.places:
            self.membership.refusal = f"{self.names[node]} (node {node}) was started again before the job had started"
        self._lose_members(node, "was started again")

    def _on_lost(self, node: int) -> None:
        logger.warning("%s (node %d): connection %s", self.names[node], node, self.mesh.status(node))

    def _on_connect(self, node: int, _hello: dict[str, Any]) -> None:
        logger.info("%s (node %d) is connected", self.names[node], node)
        if self.membership.view is None and self.form:
            self.mesh.send(node, {"form": self.form})
        # Facts went to connected nodes only.
        self.mesh.send(node, {"state": self._state()})
        if self._greeting is not None:
            self.mesh.send(node, self._greeting)

    def _state(self) -> dict[str, Any]:
        places = [[node, brought.capacity, brought.store] for node, brought in self.places.items()]
        addresses = list(self.mesh.addresses.items())
        return {
            **membership_state.to_json(self.membership),
            "job_id": self.job_id,
            "places": places,
            "addresses": addresses,
        }

    @property
    def _stores(self) -> dict[int, str]:
        return {node: brought.store for node, brought in self.places.items()}

    # Ballots.

    def _propose(self, view: View, now: float) -> None:
        voters = self._voters
        if not is_quorum(voters, self.mesh.connected | {self.node}, self.mesh.ended):
            if not any(self.mesh.status(n) == "broken" for n in voters - {self.node}):
                self._refuse_minority(voters)
            return
        self._round += 1
        self._ballot = ViewBallot((self._round, self.node), view, frozenset(voters))
        self._ballot_until = now + BALLOT_S
        question = {"epoch": view.epoch, "number": self._ballot.number}
        for node in voters - {self.node}:
            self.mesh.send(node, {"prepare": question})
        if self.node in voters and self._vote.promise(view.epoch, self._ballot.number):
            self._count_promise(self.node, self._vote.accepted)

    def _refuse_minority(self, voters: set[int]) -> None:
        live = sorted(voters & (self.mesh.connected | {self.node}))
        self.membership.refusal = (
            f"node {self.node} is cut off: of nodes {sorted(voters)} it reaches {live} only, and the others may "
            "continue without it"
        )

    def _drop_silent_voters(self) -> None:
        assert self._ballot is not None
        for node in set(self._ballot.voters) - self._ballot.answered - {self.node}:
            if node in self.mesh.connected:
                self.mesh.drop(node, f"it did not vote within {BALLOT_S:g} s")
        self._ballot = None

    def _count_promise(self, node: int, accepted: tuple[BallotNumber, View] | None) -> None:
        ballot = self._ballot
        if ballot is None or not ballot.take_promise(node, accepted, self.mesh.ended):
            return
        for voter in ballot.voters - {self.node}:
            self.mesh.send(voter, {"accept": {"number": ballot.number, "view": ballot.view.to_json()}})
        if self.node in ballot.voters and self._vote.accept(ballot.number, ballot.view):
            self._count_acceptance(self.node)

    def _count_acceptance(self, node: int) -> None:
        ballot = self._ballot
        if ballot is None or not ballot.take_acceptance(node, self.mesh.ended):
            return
        self._ballot = None
        self.mesh.broadcast({"decided": ballot.view.to_json()})
        self._adopt(ballot.view)

    def _adopt(self, view: View) -> None:
        if self.membership.view is None or view.epoch > self.membership.view.epoch:
            self.membership.adopt(view)
            self.on_view(view)

    # Messages.

    def take(self, node: int, message: dict[str, Any]) -> None:
        """Take a message of another node."""
        handlers: dict[str, Callable[[int, Any], None]] = {
            "fact": self._take_fact,
            "state": self._take_state,
            "prepare": self._take_prepare,
            "promise": self._take_promise,
            "accept": self._take_accept,
            "accepted": self._take_accepted,
            "decided": lambda _node, view: self._adopt(View.from_json(view)),
            "refuse": self._take_refusal,
            "form": lambda _node, _offers: None,  # known here since this node began
        }
        try:
            (kind, body), *_ = message.items()
            if kind in handlers:
                handlers[kind](node, body)
            else:
                self.on_other(node, message)
        except UNREADABLE as error:
            logger.warning("node %d sent %.200r, which this version does not know (%r)", node, message, error)

    def _take_fact(self, _node: int, fact: list[Any]) -> None:
        membership_state.record_fact(self.membership, fact)

    def _take_state(self, _node: int, remote: dict[str, Any]) -> None:
        self.adopt_state(remote)

    def adopt_state(self, remote: dict[str, Any]) -> None:
        """Add what other nodes know."""
        for node, address in remote["addresses"]:
            self.mesh.add_node(int(node), parse_address(address))
        self.places |= {node: NodePlace(count, store) for node, count, store in remote["places"] if node != self.node}
        if membership_state.merge(self.membership, remote) and self.membership.view is not None:
            self.on_view(self.membership.view)

    def _take_refusal(self, _node: int, why: str) -> None:
        self.membership.refusal = self.membership.refusal or why

    def _take_prepare(self, node: int, question: dict[str, Any]) -> None:
        number = _number(question["number"])
        view = self.membership.view
        if view is not None and question["epoch"] <= view.epoch:
            self.mesh.send(node, {"decided": view.to_json()})  # the proposer missed it
            return
        self._round = max(self._round, number[0])
        if self._vote.promise(question["epoch"], number):
            accepted = self._vote.accepted
            answer = None if accepted is None else [accepted[0], accepted[1].to_json()]
            self.mesh.send(node, {"promise": {"number": number, "accepted": answer}})

    def _take_promise(self, node: int, answer: dict[str, Any]) -> None:
        accepted = answer["accepted"]
        if self._ballot is not None and _number(answer["number"]) == self._ballot.number:
            before = None if accepted is None else (_number(accepted[0]), View.from_json(accepted[1]))
            self._count_promise(node, before)

    def _take_accept(self, node: int, proposal: dict[str, Any]) -> None:
        number, view = _number(proposal["number"]), View.from_json(proposal["view"])
        if self._vote.accept(number, view):
            self.mesh.send(node, {"accepted": {"number": number}})

    def _take_accepted(self, node: int, answer: dict[str, Any]) -> None:
        if self._ballot is not None and _number(answer["number"]) == self._ballot.number:
            self._count_acceptance(node)


def _number(values: list[int]) -> BallotNumber:
    turn, node = values
    return int(turn), int(node)
