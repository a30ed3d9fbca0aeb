"""`MembershipClient`: who the members of an elastic job are, as the launcher of this node tells this rank.

The launcher decides which processes belong to the job and numbers its decisions: a `View` for each membership epoch.
Ranks take a new view up where they can: after a loss when a collective fails, else between two updates. Messages are
JSON lines over a socket that the rank was forked with. Frozen processes are ended by the launcher (fencing), so that a
view never has a member that may come back by itself.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.cluster.view import View
from phalanx.comm.waits.polling import Pause
from phalanx.errors import InternalError, PeerLostError

logger = logging.getLogger("phalanx.comm")

PATIENCE_S = 2.0
"""Seconds beyond a usual step after which a rank that is waited for is suspected, unless PHALANX_PATIENCE_S says."""

FIRST_PATIENCE_S = 30.0
"""The same before a step has shown what is usual."""

VIEW_TIMEOUT_S = 30.0
"""Longest wait for the launcher's next view after a collective failed."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 5e-5, 0.01
"""Pause between two looks at a collective of another backend, doubled from the first to the longest."""

_USUAL_OF, _FEW = 16, 3
"""Steps whose median is usual; of fewer than so many it is the longest."""


class MembershipClient:
    """This rank's connection to its launcher.

    Args:
        connection: The socket.
        own_id: This process's member id.
        patience_s: Seconds beyond a usual step after which a rank is suspected.
    """

    def __init__(self, connection: socket.socket, own_id: str, patience_s: float = PATIENCE_S) -> None:
        self.id = own_id
        self.patience_s = patience_s
        self.view: View | None = None
        """The view in use."""

        self.newest: View | None = None
        """The view that came last."""

        self.is_joining = False
        """Whether this process was started beside a job that runs, and is not a member yet."""

        self._socket = connection
        self._poll = select.poll()  # numbers of descriptors may be large
        self._poll.register(connection, select.POLLIN)
        self._views: dict[int, View] = {}
        self._received = b""
        self._lock = threading.RLock()
        self._steps: deque[float] = deque(maxlen=_USUAL_OF)
        self._expected_s = 0.0
        self._suspected_at = 0.0
        self._refused = ""

    # -- messages ----------------------------------------------------------------------------------------------

    def send(self, kind: str, **values: Any) -> None:
        """Tell the launcher something. A launcher that is gone is no error here: it takes its ranks with it."""
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(json.dumps({kind: values}).encode() + b"\n")

    def receive(self, timeout_s: float = 0.0) -> None:
        """Take what the launcher has sent, waiting for it at most `timeout_s`.

        Raises:
            PeerLostError: If the launcher says that the job is over for this rank.
        """
        with self._lock:
            while self._poll.poll(timeout_s * 1e3):
                timeout_s = 0.0
                data = self._socket.recv(1 << 16)
                if not data:
                    self._refused = "The launcher of this node has ended."
                    break
                self._received += data
                *lines, self._received = self._received.split(b"\n")
                for line in lines:
                    self._take(json.loads(line))
            if self._refused:
                raise PeerLostError(self._refused)

    def _take(self, message: dict[str, Any]) -> None:
        if "view" in message:
            self.newest = view = View.from_json(message["view"])
            self._views[view.epoch] = view
            if self.view is None and self.id in view.ids and not self.is_joining:
                self.view = view
        elif "joining" in message:
            self.is_joining = True
        elif "wait" in message:
            self._suspected_at = time.monotonic()
            logger.info("%s is not frozen: %s", message["wait"].get("id"), message["wait"].get("why", "it works"))
        elif "refused" in message:
            self._refused = str(message["refused"].get("why", "The launcher ended this rank's membership."))

    def await_start(self, timeout_s: float = VIEW_TIMEOUT_S) -> None:
        """Wait for the launcher's first message.

        Raises:
            PeerLostError: If it does not come.
        """
        deadline = time.monotonic() + timeout_s
        while self.view is None and not self.is_joining:
            if time.monotonic() > deadline:
                raise PeerLostError(f"the launcher of this node sent no view within {timeout_s:g} s")
            self.receive(0.5)

    def view_of(self, epoch: int) -> View:
        """Return a view that has come."""
        return self._views[epoch]

    def await_newer(self, epoch: int, timeout_s: float = VIEW_TIMEOUT_S) -> View | None:
        """Return the newest view once there is one of a later epoch; None if none comes in time."""
        deadline = time.monotonic() + timeout_s
        while self.newest is None or self.newest.epoch <= epoch:
            if time.monotonic() > deadline:
                return None
            self.receive(0.05)
        return self.newest

    def use(self, view: View) -> None:
        """Note that this rank takes a view up."""
        self.view = view
        for epoch in [old for old in self._views if old < view.epoch]:
            del self._views[epoch]

    # -- losses ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise if the view in use is over: a member is lost, or one that was to join or leave.

        Raises:
            PeerLostError: Gives the launcher's reason.
        """
        self.receive()
        if self.newest is None or self.view is None or self.newest.epoch <= self.view.epoch:
            return
        if self.is_joining:
            raise PeerLostError(f"membership changed before this rank was taken in: {self.newest.reason}")
        if not self.newest.planned:
            raise PeerLostError(f"{self.newest.reason}; membership epoch {self.newest.epoch} continues without it")

    def count_step(self, seconds: float) -> None:
        """Note what a step took, for what is usual."""
        self._steps.append(seconds)

    def expect_step(self, seconds: float) -> None:
        """Note what a usual step takes on the others, for as long as none was timed here; 0 where none was there."""
        self._expected_s = seconds

    @property
    def usual_step_s(self) -> float:
        """Seconds from which the patience with a rank counts: a usual step, of the others before the first here."""
        return self.timed_step_s or self._expected_s or FIRST_PATIENCE_S - self.patience_s

    @property
    def timed_step_s(self) -> float:
        """Seconds of a usual step, as they were timed here; 0 before the first."""
        if not self._steps:
            return 0.0
        if len(self._steps) < _FEW:
            return max(self._steps)
        return statistics.median(self._steps)

    def suspect(self, ranks: Sequence[int], waited_s: float) -> None:
        """Ask the launcher about ranks that were waited for longer than the patience: at most once in that time."""
        now = time.monotonic()
        if self.view is None or waited_s < self.usual_step_s + self.patience_s:
            return
        if now - self._suspected_at < self.patience_s:
            return
        self._suspected_at = now
        ids = [self.view.members[rank].id for rank in ranks if rank < len(self.view.members)]
        self.send("suspect", epoch=self.view.epoch, ids=ids, waited_s=round(waited_s, 3))

    def suspect_other_nodes(self, waited_s: float) -> None:
        """Ask about the ranks of all other nodes, where it cannot be told which of them is late."""
        if self.view is not None:
            own = next(member.node for member in self.view.members if member.id == self.id)
            self.suspect([rank for rank, member in enumerate(self.view.members) if member.node != own], waited_s)


_membership: MembershipClient | None = None


def connect(env: Mapping[str, str] | None = None) -> MembershipClient | None:
    """Return this process's membership of an elastic job, connected at the first call; None in any other job.

    Raises:
        PeerLostError: If the launcher does not answer.
    """
    global _membership
    env = os.environ if env is None else env
    number = env.get("PHALANX_MEMBERSHIP_FD", "")
    if _membership is None and number:
        os.set_inheritable(int(number), False)
        own_id = env.get("PHALANX_MEMBER_ID", "")
        if not own_id:
            raise InternalError("PHALANX_MEMBERSHIP_FD is set without PHALANX_MEMBER_ID")
        patience_s = float(env.get("PHALANX_PATIENCE_S", "") or PATIENCE_S)
        _membership = MembershipClient(socket.socket(fileno=int(number)), own_id, patience_s)
        _membership.send("pid", pid=os.getpid())
        _membership.await_start()
    return _membership


def current() -> MembershipClient | None:
    """Return this process's membership of an elastic job; None in any other job."""
    return _membership


def check_members() -> None:
    """Raise if a member of this elastic job is lost; nothing in any other job.

    Raises:
        PeerLostError: Gives the launcher's reason.
    """
    if _membership is not None:
        _membership.check()


def wait_for(work: Any) -> None:
    """Wait for a collective of any backend; in an elastic job, at most until a member is lost.

    Raises:
        PeerLostError: If one is.
    """
    if _membership is None or getattr(work, "watches_members", False):
        work.wait()
        return
    began, pause = time.monotonic(), Pause(FIRST_PAUSE_S, LONGEST_PAUSE_S)
    while not work.is_completed():
        _membership.check()
        _membership.suspect_other_nodes(time.monotonic() - began)
        pause.wait()
    work.wait()


def forget() -> None:
    """Disconnect, at the end of this process's part in the job."""
    global _membership
    if _membership is not None:
        _membership.send("done")
        _membership._socket.close()
        _membership = None
