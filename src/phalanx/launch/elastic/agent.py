"""`ElasticAgent`: tells the ranks of this node who belongs to the job, and acts on what they say.

rank -> agent   {"pid"}, {"ready"}, {"suspect"}, {"leave"}, {"joined"}, {"abandon"}, {"done"}
agent -> rank   {"view"}, {"joining"}, {"wait"}, {"refused"}
"""

from __future__ import annotations

import logging
import selectors
import signal
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from phalanx.cluster.view import Member, View
from phalanx.launch.elastic.channel import UNREADABLE, MemberChannel
from phalanx.launch.elastic.history import History
from phalanx.launch.elastic.joiners import Joiners, RestartBudget
from phalanx.launch.elastic.nodes.node_group import NodeGroup
from phalanx.launch.elastic.rank_host import MemberExit, RankHost
from phalanx.launch.elastic.scaling import Scaling
from phalanx.launch.elastic.suspicion import Suspicion

logger = logging.getLogger("phalanx.launch")

SAME_ERROR_S = 60.0
"""Within which the same exception on a second rank is a mistake of the program rather than the loss of a rank."""


@dataclass(kw_only=True)
class ElasticAgent:
    """The agent of one node."""

    group: NodeGroup
    budget: RestartBudget
    rank_host: RankHost
    initial: tuple[str, ...]
    """Members that the job starts with, by rank; empty on a node that comes later."""

    history: History = field(default_factory=lambda: History(time.time()))
    _channels: dict[str, MemberChannel] = field(default_factory=dict)
    _connected: set[str] = field(default_factory=set)
    _done: set[str] = field(default_factory=set)
    _errors: dict[str, float] = field(default_factory=dict)
    _was_used: bool = False
    _is_outcast: bool = False
    _last_ids: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.node, self.membership = self.group.node, self.group.membership
        own = sum(member_id.startswith(f"n{self.node}.") for member_id in self.initial)
        self._joiners = Joiners(self.group, self.budget, self.rank_host, next_id=own)
        self.scaling = Scaling(self.group)
        self._suspicion = Suspicion(self.group, fence=self._fence, answer=self._answer, lose=self._lose)
        self.group.on_view = self._announce
        self.group.on_other = self.take

    # What the attempt tells.

    def open_channel(self, member_id: str) -> socket.socket:
        """Return the rank's end of a new channel, to be handed to the process and closed."""
        ours, theirs = socket.socketpair()
        self._channels[member_id] = MemberChannel(ours, member_id)
        return theirs

    def note_start(self, member: Member) -> None:
        """Take notice of a process that runs now."""
        self.group.record("add", member.to_json())
        if member.id not in self.initial:
            self._send(member.id, {"joining": {"epoch": self._view.epoch, "store": self._view.store, "id": member.id}})

    def note_exit(self, ended: MemberExit) -> bool:
        """Take notice of the end of a process; returns False where it fails the job."""
        member_id = ended.member_id
        self._read(member_id)
        self._channels.pop(member_id).close()
        fence = self._suspicion.close(member_id)
        if ended.code == 0 or (member_id in self._done and ended.code < 0):
            self.group.record("finish", member_id)
        elif self._joiners.is_dismissed(member_id):
            if member_id not in self.membership.finished:
                self.group.record("lose", member_id, "not needed")
        elif fence is not None:
            self._lose(member_id, fence)
        elif self._is_fatal(ended):
            self.group.broadcast({"refuse": f"{self.title(member_id)} {ended.description}"})
            return False
        else:
            self._lose(member_id, f"{self.title(member_id)} {ended.description}")
        return True

    def _is_fatal(self, ended: MemberExit) -> bool:
        """Whether the program is at fault, or nobody would follow a new view."""
        view = self.membership.view
        if view is None:
            return True
        if ended.member_id not in view.ids:
            return False
        if ended.member_id in self._done or not self._connected:
            return True
        if ended.kind != "exception":
            return False
        now = time.monotonic()
        is_repeated = now - self._errors.get(ended.error, -SAME_ERROR_S) < SAME_ERROR_S
        self._note_error(ended.error)
        self.group.broadcast({"error": ended.error})
        return is_repeated or not self._was_used

    def _note_error(self, error: str) -> None:
        self._errors[error] = time.monotonic()

    def _lose(self, member_id: str, reason: str) -> None:
        """Count a process as gone, once."""
        if member_id in self.membership.gone:
            return
        self._joiners.note_loss()
        if not self.group.record("lose", member_id, reason):
            logger.warning("%s; it was no rank yet, or not any more", reason)

    # The loop.

    def register(self, ready: selectors.BaseSelector) -> None:
        """Add the channels and connections to what is waited for."""
        self.group.mesh.register(ready)
        for member_id, channel in self._channels.items():
            if channel.socket is not None:
                ready.register(channel.socket, channel.events, lambda member_id=member_id: self._serve(member_id))

    def update(self, *, is_stopping: bool) -> None:
        """Do what is due: judge suspects, agree on a view, start joiners; nothing of it while the job is ended here."""
        now = time.monotonic()
        self.group.mesh.update(now)
        if self.scaling.is_closed or is_stopping:
            return
        if self.membership.view is None:
            self.group.start(self.initial)
        else:
            self._suspicion.update(now)
            self.group.update(now)
            if self.membership.view is not None and not self.membership.refusal:
                self.scaling.keep_draining()
                self._joiners.start_missing(self._channels, now)
                self._joiners.dismiss_surplus(self._channels)
                self._joiners.dismiss_stranded(self._channels, self.initial)
        if self.membership.refusal:
            self._refuse()

    def close(self) -> None:
        """Leave the other nodes and close the channels."""
        self.group.mesh.close()
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()

    @property
    def is_over(self) -> bool:
        """Whether every member has finished."""
        return self.membership.is_over

    @property
    def refusal(self) -> str:
        """Why the job cannot continue; empty while it can."""
        return self.membership.refusal

    # Messages of ranks.

    def _serve(self, member_id: str) -> None:
        if channel := self._channels.get(member_id):
            channel.flush()
        self._read(member_id)

    def _read(self, member_id: str) -> None:
        channel = self._channels.get(member_id)
        for message in channel.receive() if channel is not None else ():
            try:
                self._handle(member_id, message)
            except UNREADABLE as error:
                logger.warning("%s sent %.200r, which is no membership message (%r)", member_id, message, error)

    def _handle(self, member_id: str, message: dict[str, Any]) -> None:
        if "pid" in message:
            self._connected.add(member_id)
        elif "ready" in message:
            self.group.record("admit", member_id)
        elif "suspect" in message:
            self._suspicion.take(member_id, message["suspect"])
        elif "leave" in message:
            self.scaling.leave(member_id, str(message["leave"].get("reason", "")))
        elif "joined" in message:
            self._take_up(member_id, message["joined"])
            self.group.broadcast({"took_up": {"id": member_id, **message["joined"]}})
        elif "abandon" in message:
            self._abandon(str(message["abandon"]["why"]))
        elif "done" in message:
            self._done.add(member_id)

    def _abandon(self, why: str) -> None:
        """End the job: a lost rank had what is needed to continue."""
        if self.membership.refusal:
            return
        logger.warning("the job cannot continue: %s", why)
        self.membership.refusal = why
        for event in self.history.settle():
            event.ended = why
            self.rank_host.on_event(event)

    def _take_up(self, member_id: str, details: dict[str, Any]) -> None:
        self._was_used = True
        self.history.add_report(member_id, details, time.time())
        if self.membership.take_up(member_id, int(details["epoch"])):
            for event in self.history.settle():
                self.rank_host.on_event(event)
            self.rank_host.on_settled(self._view)

    # Messages of other nodes that are not about membership itself.

    def take(self, node: int, message: dict[str, Any]) -> None:
        """Take a message of another node's agent."""
        if "took_up" in message:
            details = message["took_up"]
            self._take_up(details["id"], details)
        elif "error" in message:
            self._note_error(message["error"])
        elif "wait" in message:
            self._send(message["to"], {"wait": message["wait"]})
        elif "exit" in message:
            self.rank_host.on_remote_exit(message["exit"]["id"], message["exit"]["how"])
        elif "stop" in message:
            self.rank_host.on_remote_stop(node)
        elif "probe" in message or "observed" in message:
            self.rank_host.on_probe(node, message)
        elif "arrive" in message:
            self.scaling.welcome(node, int(message["arrive"]["capacity"]), str(message["arrive"]["store"]))
        else:
            self._suspicion.take_from_node(node, message)

    # Decisions.

    def _fence(self, member_id: str, reason: str) -> str:
        reason = f"{self.title(member_id)} {reason}"
        logger.warning("%s. It is killed, so that it cannot come back.", reason)
        self.rank_host.signal_members([member_id], signal.SIGKILL)
        return reason

    def _answer(self, reporter: str, suspect: str, why: str) -> None:
        answer = {"wait": {"id": suspect, "why": why}}
        if reporter in self._channels:
            self._send(reporter, answer)
        else:
            self.group.mesh.send(self.membership.members[reporter].node, {**answer, "to": reporter})

    def _announce(self, view: View) -> None:
        if view.epoch > 0:
            log = logger.info if view.planned else logger.warning
            log("view %d: %s. Continuing with %d ranks", view.epoch, view.reason, len(view.members))
        for event in self.history.add_view(view, time.time()):
            self.rank_host.on_event(event)
        self.rank_host.on_view(view)
        if not view.planned and any(self._is_left_out(member_id, view) for member_id in self._channels):
            self._is_outcast = True
            self.membership.refusal = f"the other nodes continued without node {self.node}: {view.reason}"
            return
        self._last_ids = view.ids
        for member_id in {*view.ids, *self.membership.leaving}:
            self._send(member_id, {"view": view.to_json()})

    def _is_left_out(self, member_id: str, view: View) -> bool:
        """Whether the others lost a rank of this node that runs here and was in the last view."""
        if member_id not in self._last_ids or member_id in view.ids:
            return False
        return member_id not in self.membership.departures and not self._suspicion.is_fenced(member_id)

    def _refuse(self) -> None:
        """Tell the ranks, and the other nodes, that the job ends."""
        self.scaling.is_closed = True
        if not self._is_outcast:
            self.group.broadcast({"refuse": self.membership.refusal})
        epoch = -1 if self.membership.view is None else self._view.epoch
        for member_id in self._channels:
            self._send(member_id, {"refused": {"epoch": epoch, "why": self.membership.refusal}})

    # Nodes that come and go.

    def join(self, state: dict[str, Any]) -> None:
        """Join a job that runs on other nodes, with as many ranks as this node may have."""
        self._joiners.next_id = 1 + max((int(i.partition(".")[2]) for i in _ids_of(self.node, state)), default=-1)
        self.group.adopt_state(state)
        self.scaling.arrive()

    # Commands.

    def scale(self, size: int) -> str:
        """Change how many ranks the job should have; returns what follows, in words.

        Raises:
            LaunchError: If the job may not have that many, or is about to end.
        """
        answer = self.scaling.scale(size)
        self._joiners.forget_losses()
        return answer

    def status(self) -> dict[str, Any]:
        """Return what `phalanx ps` shows of the members."""
        membership = self.membership
        if membership.view is None:
            return {}
        return {
            "epoch": membership.view.epoch,
            "least": membership.limits.least,
            "most": membership.limits.most,
            "target": sum(membership.targets.values()),
            "members": [{**m.to_json(), "rank": rank} for rank, m in enumerate(membership.view.members)],
            "joiners": [membership.members[i].to_json() for i in membership.joiners],
            "events": [event.to_json() for event in self.history.events[-5:]],
        }

    # Names.

    def _send(self, member_id: str, message: dict[str, Any]) -> None:
        if channel := self._channels.get(member_id):
            channel.send(message)

    @property
    def _view(self) -> View:
        assert self.membership.view is not None
        return self.membership.view

    def title(self, member_id: str) -> str:
        """Return what to call a member in a message."""
        view, pid = self.membership.view, self.membership.members[member_id].pid
        if view is None or member_id not in view.ids:
            return f"{member_id} (pid {pid})"
        return f"rank {view.rank(member_id)} ({member_id}, pid {pid})"


def _ids_of(node: int, state: dict[str, Any]) -> list[str]:
    """Return every member id that a node has had, as far as others know."""
    return [member["id"] for member in state["members"] if member["node"] == node]
