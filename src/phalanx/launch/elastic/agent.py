"""`ElasticAgent`: tells the ranks of this node who belongs to the job, and acts on what they say.

rank -> agent   {"pid"}, {"ready"}, {"suspect"}, {"leave"}, {"joined"}, {"done"}
agent -> rank   {"view"}, {"joining"}, {"wait"}, {"refused"}
"""

from __future__ import annotations

import logging
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from phalanx.errors import LaunchError
from phalanx.launch.elastic.budget import RestartBudget
from phalanx.launch.elastic.channel import MemberChannel
from phalanx.launch.elastic.history import EpochEvent, History
from phalanx.launch.elastic.membership import Membership, distribute_ranks
from phalanx.launch.elastic.suspects import Suspects, Verdict
from phalanx.launch.elastic.view import Member, View

logger = logging.getLogger("phalanx.launch")

FENCE_S = 0.5
"""How long a process may take to die of SIGKILL before the others go on without it."""

SAME_ERROR_S = 60.0
"""Within which the same exception on a second rank is a mistake of the program rather than the loss of a rank."""


class RankHost(Protocol):
    """Who starts and ends processes for the agent."""

    def start_joiner(self, member_id: str) -> None:
        """Start a process that will join."""

    def signal_members(self, member_ids: Sequence[str], number: int) -> None:
        """Send a signal to the process groups of members."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberExit:
    """How the process of a member ended."""

    member_id: str
    code: int
    said: str
    """How it ended, in words."""

    kind: str = ""
    """"exception" or "peer" where the process recorded an error."""

    error: str = ""


@dataclass(slots=True)
class _Fence:
    reason: str
    deadline: float
    is_lost: bool = False


@dataclass(kw_only=True)
class ElasticAgent:
    """The agent of one node."""

    membership: Membership
    budget: RestartBudget
    rank_host: RankHost
    node: int
    store: str
    """`host:port` of this node's store."""

    initial: tuple[str, ...]
    """Members that the job starts with, by rank."""

    on_view: Callable[[View], None]
    """Called with each view that the ranks are told."""

    on_settled: Callable[[View], None]
    """Called when every member computes in the view."""

    on_event: Callable[[EpochEvent], None]
    """Called with each change of the members once it is over."""

    history: History = field(default_factory=lambda: History(time.time()))

    _channels: dict[str, MemberChannel] = field(default_factory=dict)
    _connected: set[str] = field(default_factory=set)
    _done: set[str] = field(default_factory=set)
    _fenced: dict[str, _Fence] = field(default_factory=dict)
    _errors: dict[str, float] = field(default_factory=dict)
    _suspects: Suspects = field(default_factory=Suspects)
    _ended_early: list[str] = field(default_factory=list)
    _next_id: int = 0
    _owed: int = 0
    _was_used: bool = False
    _is_closed: bool = False
    _dismissed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._next_id = sum(self._is_local(member_id) for member_id in self.initial)

    # What the attempt tells.

    def open_channel(self, member_id: str) -> socket.socket:
        """Return the rank's end of a new channel, to be handed to the process and closed."""
        ours, theirs = socket.socketpair()
        self._channels[member_id] = MemberChannel(ours, member_id)
        return theirs

    def note_start(self, member: Member) -> None:
        """Take notice of a process that runs now."""
        self.membership.add(member)
        if member.id not in self.initial:
            self._send(member.id, {"joining": {"epoch": self._view.epoch, "store": self._view.store, "id": member.id}})
        elif all(member_id in self.membership.members for member_id in self.initial):
            self._announce(self.membership.start(self.initial, self.store))
            for member_id in self._ended_early:
                self.membership.finish(member_id)

    def note_exit(self, ended: MemberExit) -> bool:
        """Take notice of the end of a process; returns False where it fails the job."""
        member_id = ended.member_id
        self._read(member_id)
        self._suspects.close(member_id)
        self._channels.pop(member_id).close()
        fence = self._fenced.pop(member_id, None)
        if self.membership.view is None:
            self._ended_early.append(member_id)
            return ended.code == 0
        if fence is not None and fence.is_lost:
            return True
        if ended.code == 0 or (member_id in self._done and ended.code < 0):
            self.membership.finish(member_id)
            return True
        if member_id in self._dismissed:
            self.membership.lose(member_id, "not needed")
            return True
        if self._is_fatal(ended):
            return False
        self._lose(member_id, fence.reason if fence else f"{self._title(member_id)} {ended.said}")
        return True

    def _is_fatal(self, ended: MemberExit) -> bool:
        """Whether the program is at fault, or nobody would follow a new view."""
        if ended.member_id in self._done or not self._connected:
            return True
        if ended.kind != "exception":
            return False
        now = time.monotonic()
        is_repeated = now - self._errors.get(ended.error, -SAME_ERROR_S) < SAME_ERROR_S
        self._errors[ended.error] = now
        return is_repeated or not self._was_used

    def _lose(self, member_id: str, reason: str) -> None:
        self._owed += 1
        if not self.membership.lose(member_id, reason):
            logger.warning("%s; it was no rank yet, or not any more", reason)

    # The loop.

    def register(self, ready: selectors.BaseSelector) -> None:
        """Add the channels to what is waited for."""
        for member_id, channel in self._channels.items():
            if channel.socket is not None:
                ready.register(channel.socket, channel.events, lambda member_id=member_id: self._serve(member_id))

    def update(self) -> None:
        """Do what is due: judge suspects, tell a new view, start joiners."""
        if self._is_closed or self.membership.view is None:
            return
        now = time.monotonic()
        if not self._suspects.is_empty:
            for verdict in self._suspects.verdicts(now):
                self._act_on(verdict, now)
        for member_id, fence in self._fenced.items():
            if now > fence.deadline and not fence.is_lost:  # the kernel cannot end it yet, but it runs no more
                fence.is_lost = True
                self._lose(member_id, fence.reason)
        if view := self.membership.next_view(self.store):
            self.membership.adopt(view)
            self._announce(view)
        elif self.membership.refusal:
            self._refuse()
        self._start_joiners(now)

    def stop(self) -> None:
        """Make no more views: the job is being ended."""
        self._is_closed = True

    def close(self) -> None:
        """Close the channels."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()

    @property
    def is_over(self) -> bool:
        """Whether every member has finished."""
        return self.membership.is_over

    @property
    def refusal(self) -> str:
        """Why the job cannot go on; empty while it can."""
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
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                logger.warning("%s sent %.200r, which is no membership message (%r)", member_id, message, error)

    def _handle(self, member_id: str, message: dict[str, Any]) -> None:
        if "pid" in message:
            self._connected.add(member_id)
        elif "ready" in message:
            self.membership.admit(member_id)
        elif "suspect" in message:
            self._suspect(member_id, message["suspect"])
        elif "leave" in message:
            self._leave(member_id, str(message["leave"].get("reason", "")))
        elif "joined" in message:
            self._take_up(member_id, message["joined"])
        elif "done" in message:
            self._done.add(member_id)

    def _suspect(self, reporter: str, details: dict[str, Any]) -> None:
        now = time.monotonic()
        self._suspects.note_speaker(reporter, now)
        waited_s = float(details["waited_s"])
        for suspected in details["ids"]:
            if suspected in self.membership.finished and details["epoch"] == self._view.epoch:
                self._lose(suspected, f"{self._title(suspected)} ended with exit code 0 while others waited for it")
            elif suspected != reporter and suspected not in self._fenced and self.membership.is_awaited(suspected):
                self._suspects.suspect(self.membership.members[suspected], reporter, waited_s, now)

    def _leave(self, member_id: str, reason: str) -> None:
        targets = self.membership.targets
        if sum(targets.values()) > self.membership.limits.least:
            targets[self.node] -= 1
        self.membership.depart([member_id], reason or "by its own wish")

    def _take_up(self, member_id: str, details: dict[str, Any]) -> None:
        self._was_used = True
        self.history.add_report(member_id, details, time.time())
        if self.membership.take_up(member_id, int(details["epoch"])):
            for event in self.history.settle():
                self.on_event(event)
            self.on_settled(self._view)

    # Decisions.

    def _act_on(self, verdict: Verdict, now: float) -> None:
        member_id = verdict.member.id
        if not verdict.is_frozen:
            for reporter in verdict.reporters:
                self._send(reporter, {"wait": {"id": member_id, "why": verdict.why}})
            return
        reason = f"{self._title(member_id)} {verdict.why}"
        logger.warning("%s. It is killed, so that it cannot come back.", reason)
        self._fenced[member_id] = _Fence(reason, now + FENCE_S)
        self.rank_host.signal_members([member_id], signal.SIGKILL)

    def _announce(self, view: View) -> None:
        if view.epoch > 0:
            log = logger.info if view.planned else logger.warning
            log("view %d: %s. %d ranks go on", view.epoch, view.reason, len(view.members))
        for event in self.history.add_view(view, time.time()):
            self.on_event(event)
        self.on_view(view)
        for member_id in {*view.ids, *self.membership.leaving}:
            self._send(member_id, {"view": view.to_json()})

    def _refuse(self) -> None:
        """Tell the ranks that the job ends."""
        self._is_closed = True
        refusal = {"epoch": self._view.epoch, "why": self.membership.refusal}
        for member_id in self._channels:
            self._send(member_id, {"refused": refusal})

    def _start_joiners(self, now: float) -> None:
        starting = [i for i in self._channels if i not in self.membership.members]
        missing = self.membership.missing(self.node) - len(starting)
        for _ in range(missing):
            if self._owed > 0:
                if self.budget.remaining(now) <= 0:
                    self.membership.targets[self.node] -= missing
                    logger.warning("lost ranks are not replaced any more: the restart budget is used up")
                    return
                self.budget.spend(now)
                self._owed -= 1
            self.rank_host.start_joiner(f"n{self.node}.{self._next_id}")
            self._next_id += 1

    # Commands.

    def scale(self, size: int) -> str:
        """Change how many ranks the job should have; returns what follows, in words.

        Raises:
            LaunchError: If the job may not have that many, or is about to end.
        """
        limits = self.membership.limits
        if not limits.least <= size <= limits.most:
            raise LaunchError(
                f"{size} ranks were asked for, but the job was started with {limits.least} to {limits.most}. "
                "Give a number in that range."
            )
        if self.membership.view is None or self.membership.has_finished or self._is_closed:
            raise LaunchError("The job is starting or about to end, so its ranks stay as they are.")
        before = sum(self.membership.targets.values())
        self._owed = 0
        self.membership.scale(distribute_ranks(size, {self.node: limits.most}), f"scaled to {size} ranks")
        unneeded = self.membership.surplus_joiners(self.node)
        self._dismissed.update(unneeded)
        self.rank_host.signal_members(unneeded, signal.SIGKILL)
        return f"{before} ranks -> {size} ranks" if before != size else f"the job has {size} ranks already"

    def status(self) -> dict[str, Any]:
        """Return what `phalanx ps` shows of the members."""
        membership = self.membership
        if membership.view is None:
            return {}
        return {
            "epoch": membership.view.epoch,
            "least": membership.limits.least,
            "most": membership.limits.most,
            "wanted": sum(membership.targets.values()),
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

    def _is_local(self, member_id: str) -> bool:
        return member_id.startswith(f"n{self.node}.")

    def _title(self, member_id: str) -> str:
        view, pid = self._view, self.membership.members[member_id].pid
        if member_id not in view.ids:
            return f"{member_id} (pid {pid})"
        return f"rank {view.rank(member_id)} ({member_id}, pid {pid})"
