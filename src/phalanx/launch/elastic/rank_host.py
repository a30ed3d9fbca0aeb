"""`RankHost`: who starts and ends processes for the agent of a node, and is told what happened (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from phalanx.cluster.view import View
from phalanx.launch.elastic.history import EpochEvent


class RankHost(Protocol):
    """Who starts and ends processes for the agent, and is told what happened."""

    @property
    def free_slots(self) -> int:
        """How many more processes may run here now."""

    def start_joiner(self, member_id: str) -> None:
        """Start a process that will join."""

    def signal_members(self, member_ids: Sequence[str], number: int) -> None:
        """Send a signal to the process groups of members of this node."""

    def on_view(self, view: View) -> None:
        """Take notice of a view that the ranks were told."""

    def on_settled(self, view: View) -> None:
        """Take notice that every member computes in the view."""

    def on_event(self, event: EpochEvent) -> None:
        """Take notice of a change of the members that is over."""

    def on_remote_exit(self, member_id: str, process_exit: dict[str, Any]) -> None:
        """Take notice of a failure on another node."""

    def on_probe(self, node: int, message: dict[str, Any]) -> None:
        """Take part in a probe at the ranks of all nodes."""

    def on_remote_stop(self, node: int) -> None:
        """Take notice that a person or a scheduler ends the job on another node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberExit:
    """How the process of a member ended."""

    member_id: str
    code: int
    description: str
    """How it ended, in words."""

    kind: str = ""
    """"exception" or "peer" where the process recorded an error."""

    error: str = ""
