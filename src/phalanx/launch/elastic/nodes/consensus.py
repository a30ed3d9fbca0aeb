"""`ViewVote` and `ViewBallot`: the nodes of a view agree on the next one, whoever proposes it (pure).

Paxos, one decision for each epoch. The voters on epoch e + 1 are the nodes of the view of epoch e. A proposer asks them
to promise (and hears what they accepted before, which it then must propose), then to accept. A view that enough voters
have accepted is decided, whatever happens to the proposer, and is told to all. So two sides of a cut network never go
on with different views.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from phalanx.cluster.view import View

BallotNumber = tuple[int, int]
"""Round and node of the proposer; of two ballots the greater one counts."""

Phase = Literal["promise", "accept", "decided"]


def is_quorum(voters: Collection[int], answered: Collection[int], dead: Collection[int]) -> bool:
    """Return whether the nodes that answered may decide for all.

    They may with more than half of the voters, or with half of them if the lowest is among those; voters that are known
    to be dead cannot decide anything elsewhere, and are not counted.

    Args:
        voters: Nodes of the last view.
        answered: Nodes that agree.
        dead: Nodes whose host says that their launcher is gone.
    """
    electorate = set(voters) - set(dead)
    agreed = electorate & set(answered)
    if 2 * len(agreed) == len(electorate):
        return bool(agreed) and min(electorate) in agreed
    return 2 * len(agreed) > len(electorate)


@dataclass
class ViewVote:
    """What one node has promised and accepted for the next epoch."""

    epoch: int = 0
    promised: BallotNumber = (0, -1)
    accepted: tuple[BallotNumber, View] | None = None

    def _turn_to(self, epoch: int) -> None:
        if epoch > self.epoch:
            self.epoch, self.promised, self.accepted = epoch, (0, -1), None

    def promise(self, epoch: int, number: BallotNumber) -> bool:
        """Return whether this node promises to accept nothing older for `epoch`; `accepted` is part of the answer."""
        self._turn_to(epoch)
        if epoch < self.epoch or number < self.promised:
            return False
        self.promised = number
        return True

    def accept(self, number: BallotNumber, view: View) -> bool:
        """Return whether this node accepts a view."""
        self._turn_to(view.epoch)
        if view.epoch < self.epoch or number < self.promised:
            return False
        self.promised, self.accepted = number, (number, view)
        return True


@dataclass
class ViewBallot:
    """One attempt of a node to have its view decided."""

    number: BallotNumber
    view: View
    voters: frozenset[int]
    phase: Phase = "promise"
    answered: set[int] = field(default_factory=set)
    _newest: tuple[BallotNumber, View] | None = None

    def take_promise(self, node: int, accepted: tuple[BallotNumber, View] | None, dead: Collection[int]) -> bool:
        """Count a promise; returns whether the voters are to be asked to accept `view` now."""
        if self.phase != "promise":
            return False
        self.answered.add(node)
        if accepted is not None and (self._newest is None or accepted[0] > self._newest[0]):
            self._newest = accepted
        if not is_quorum(self.voters, self.answered, dead):
            return False
        if self._newest is not None:
            self.view = self._newest[1]
        self.phase, self.answered = "accept", set()
        return True

    def take_acceptance(self, node: int, dead: Collection[int]) -> bool:
        """Count an acceptance; returns whether `view` is decided now."""
        if self.phase != "accept":
            return False
        self.answered.add(node)
        if not is_quorum(self.voters, self.answered, dead):
            return False
        self.phase = "decided"
        return True
