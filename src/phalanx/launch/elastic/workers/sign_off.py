"""`SignOff`: tells the parameter servers of a job that a worker is gone, beside the launcher's loop.

Each server is asked until it has answered; the end of the attempt ends that, or a server that has refused for
`REFUSED_S`. First all say how many pushes of the
worker they have (`fence`), and from then on refuse what its process may still have on its way. Then all are told how
many of them count (`leave`): those that every server has. One more, in whose midst the process was killed, counts on
no server if its step is not complete yet; where it is, the outcome says so.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from typing import NamedTuple

from phalanx.errors import ClosedError, PeerLostError, PhalanxError
from phalanx.ps.wire.client.connection import Connection

logger = logging.getLogger("phalanx.launch")

CONNECT_S = 5.0
"""Longest wait for a server at once; it is asked again after that."""

_ANSWER_S = 60.0
"""Longest silence of a server before it is asked anew."""

_PAUSE_S = 0.5
"""Between two tries to tell one server."""

WARN_S = 10.0
"""How long a server may not answer before that is mentioned; and again after each minute."""

_WARN_AGAIN_S = 60.0

REFUSED_S = 300.0
"""How long a server may answer with an error before the job ends: a full disk can be emptied meanwhile."""


class SplitPush(NamedTuple):
    """A push that its worker was killed in the midst of: some servers have applied it, and others never will."""

    push: int
    """Its number, counted from 0 as servers count the worker's pushes."""

    servers: list[int]
    """Servers whose tables have it."""

    others: list[int]
    """Servers that did not get it."""


class SignOff:
    """One worker's leave, in its place. Servers then count it in no step and refuse what its process had still sent.

    Args:
        endpoints: `host:port` of every server.
        secret: The job's secret.
        worker: The worker, whose process has ended.
        workers: Most workers of the job.
    """

    def __init__(self, endpoints: Sequence[str], secret: bytes, worker: int, workers: int) -> None:
        self._endpoints, self._secret = endpoints, secret
        self._worker, self._about = worker, {"worker": worker, "workers": workers}
        self._changed = threading.Condition()
        self._is_stopped = False
        self._refusal = ""
        self._fenced: dict[int, int] = {}
        self._first: dict[int, int] = {}
        self._left: dict[int, int] = {}
        self._open: set[Connection] = set()
        for server in range(len(endpoints)):
            name = f"sign off worker {worker} at server {server}"
            threading.Thread(target=self._run, args=(server,), name=name, daemon=True).start()

    @property
    def is_done(self) -> bool:
        """Whether all servers have answered."""
        with self._changed:
            return len(self._left) == len(self._endpoints)

    @property
    def refusal(self) -> str:
        """Why the job cannot continue: a server has refused for `REFUSED_S`; empty while none has."""
        with self._changed:
            return self._refusal

    @property
    def split_push(self) -> SplitPush | None:
        """The worker's last push if it counts on some servers only, once this is done."""
        with self._changed:
            least = min(self._left.values())
            # A process that had only come counts from where each server is, which may be a step ahead of another.
            servers = [s for s, pushes in sorted(self._left.items()) if pushes > max(least, self._first[s])]
            others = [s for s, pushes in sorted(self._left.items()) if pushes == least]
        return SplitPush(least, servers, others) if servers else None

    def stop(self) -> None:
        """Tell no more servers: the attempt is over, and the next one's servers must not hear of it."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
            connections = list(self._open)
        for connection in connections:
            connection.close()

    def _run(self, server: int) -> None:
        """Tell one server, until it has answered, has refused for too long, or there is no need to."""
        started, warn_at, refused_at, was_fenced = time.monotonic(), WARN_S, None, False
        while not self._is_over(server):
            try:
                self._tell(server)
            except (PhalanxError, OSError, ValueError, LookupError, RuntimeError) as error:  # no thread left, too
                now, is_fenced = time.monotonic(), self._is_fenced(server)
                if not _is_refusal(error) or is_fenced != was_fenced:  # it has answered meanwhile
                    refused_at = None
                if _is_refusal(error):
                    refused_at = refused_at or now
                was_fenced = is_fenced
                if refused_at is not None and now - refused_at >= REFUSED_S:
                    self._give_up(server, now - refused_at, error)
                    return
                with self._changed:
                    if self._changed.wait_for(lambda: self._is_stopped, _PAUSE_S):
                        return
                if now - started >= warn_at:
                    warn_at = now - started + _WARN_AGAIN_S
                    logger.warning(
                        "server %d could not be told for %.0f s that worker %d is gone, and is asked again: %s. Read "
                        "serverlog.%d; if that server is frozen, continue or kill it",
                        server,
                        now - started,
                        self._worker,
                        error,
                        server,
                    )

    def _give_up(self, server: int, seconds: float, error: Exception) -> None:
        with self._changed:
            self._refusal = self._refusal or (
                f"server {server} has answered with an error for {seconds:.0f} s when told that worker {self._worker} "
                f"is lost: {str(error).rstrip('.')}. Read serverlog.{server}, fix the cause, and start the job again"
            )

    def _is_fenced(self, server: int) -> bool:
        with self._changed:
            return server in self._fenced

    def _is_over(self, server: int) -> bool:
        with self._changed:
            return self._is_stopped or server in self._left

    def _tell(self, server: int) -> None:
        # A connection that is lost is not made anew behind our back: the server there may be that of the next attempt.
        connection = Connection(
            self._endpoints[server],
            secret=self._secret,
            me=f"worker {self._worker}",
            peer=f"server {server}",
            timeout_s=_ANSWER_S,
            connect_s=CONNECT_S,
            client=secrets.randbits(64),
        )
        with closing(connection):
            self._admit(connection)
            try:
                fenced = connection.call("fence", self._about).meta
                pushes = self._agree(server, int(fenced["pushes"]), int(fenced["first"]))
                reply = connection.call("leave", {"pushes": pushes})
                with self._changed:
                    self._left[server] = int(reply.meta["pushes"])
            finally:
                with self._changed:
                    self._open.discard(connection)

    def _admit(self, connection: Connection) -> None:
        """Let `stop` close a connection. Raises if it has stopped meanwhile."""
        with self._changed:
            if self._is_stopped:
                raise ClosedError("the attempt is over")
            self._open.add(connection)

    def _agree(self, server: int, pushes: int, first: int) -> int:
        """Wait until every server has said how many pushes it has; return how many all have."""
        with self._changed:
            # What it said first holds: from then on it took none.
            self._fenced.setdefault(server, pushes)
            self._first.setdefault(server, first)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_stopped or len(self._fenced) == len(self._endpoints))
            if self._is_stopped:
                raise ClosedError("the attempt is over")
            return min(self._fenced.values())


def _is_refusal(error: Exception) -> bool:
    """Return whether an error is what a server has answered, not that it does not."""
    return isinstance(error, PhalanxError) and not isinstance(error, PeerLostError | ClosedError)
