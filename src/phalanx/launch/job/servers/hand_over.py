"""`HandOver`: gives the tables of a job's servers to another number of servers, beside the launcher's loop.

    the thread                                       the launcher's loop
    stop the servers at one moment of training
    have them write their tables
    make a base of them for each new server  ----->  starts the new servers
    wait until each of them has its tables   ----->  commits, and ends the old servers
    let the old servers continue, if it does not

Until the commit the old servers have changed nothing, and hold every change back. See docs/design/parameter-server.md.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from enum import Enum
from pathlib import Path
from typing import Any

from phalanx.errors import ConfigError, LaunchError, PeerLostError, PhalanxError
from phalanx.i18n import tr
from phalanx.ps.server.moved_state import difference
from phalanx.ps.server.snapshots.moved_tables import write_bases
from phalanx.ps.snapshot.callers import ask_all, collect_results, resume_all
from phalanx.ps.snapshot.moment import LEFT, furthest_steps
from phalanx.ps.wire.client.connection import Connection

logger = logging.getLogger("phalanx.launch")

PATIENCE_S = 120.0
"""How long a moment is sought at which all servers have the same pushes."""

_TRY_S = 10.0
"""How long changes are held back for one try: a worker that begins or leaves needs them, and others may wait for it."""

_BETWEEN_TRIES_S = 0.5
_SAVED_S = 0.5
"""How long a server is asked at once whether it has written its tables."""

_LOOK_S = 0.05
_HOLD_S = 1e6
"""Of a freeze: it ends by the commit, or when this lets go; so does every process of the job if this one ends."""

_CONNECT_S = 1.0
_LISTEN_S = 60.0
"""How long a new server may not listen."""

_ANSWER_S = 600.0
"""Longest silence of a server that writes or reads its tables."""


class HandOverPhase(Enum):
    """How far it is."""

    STOP = "stop"
    """The servers finish the pushes under way."""

    WRITE = "write"
    """They write their tables."""

    LOAD = "load"
    """The new servers read them."""

    READY = "ready"
    """The new servers have them."""


class HandOver:
    """One change of the number of servers, up to the commit, in a thread of its own.

    Args:
        before: `host:port` of the servers there are, by rank.
        after: Those of the new ones, which the launcher starts in phase `LOAD`.
        secret: The job's secret.
        job: Its name.
        workers: How many workers it has.
        folder: Where the folders of the new servers' state go; made here.
    """

    def __init__(
        self, before: Sequence[str], after: Sequence[str], *, secret: bytes, job: str, workers: int, folder: Path
    ) -> None:
        self._before, self._after, self._secret = before, after, secret
        self._job, self._workers, self._folder = job, workers, folder
        self._lost: set[int] = set()
        self._token = secrets.token_hex(4)
        self._changed = threading.Condition()
        self._phase, self._failure = HandOverPhase.STOP, ""
        self._is_decided = self._is_committed = self._is_stopped = self._is_frozen = False
        self._thread = threading.Thread(target=self._run, name="hand tables over", daemon=True)
        self._thread.start()

    @property
    def phase(self) -> HandOverPhase:
        """How far it is."""
        with self._changed:
            return self._phase

    @property
    def failure(self) -> str:
        """Why it came to nothing; empty while it has not."""
        with self._changed:
            return self._failure

    @property
    def is_over(self) -> bool:
        """Whether the old servers continue, or it was committed."""
        return not self._thread.is_alive()

    def commit(self) -> None:
        """The job continues with the new servers: the old ones are not let go, only ended by the caller."""
        with self._changed:
            self._is_decided = self._is_committed = True
            self._changed.notify_all()

    def give_up(self, why: str, lost_worker: int | None = None) -> None:
        """Let the old servers continue, once what they were asked is answered.

        Args:
            why: The reason.
            lost_worker: A worker whose process has ended. What that has sent and is held back is done on no server:
                some might do it before they hear of its successor, or of its loss, and some after.
        """
        with self._changed:
            self._failure = self._failure or why
            if lost_worker is not None:
                self._lost.add(lost_worker)
            self._is_decided = True
            self._changed.notify_all()

    def stop(self, why: str) -> None:
        """As `give_up`, where the job ends: old servers that do not answer are asked once more, and then left."""
        with self._changed:
            self._is_stopped = True
        self.give_up(why)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with ExitStack() as stack:
            try:
                self._hand_over(stack)
            except (PhalanxError, OSError, ValueError, LookupError, RuntimeError) as error:
                self.give_up(str(error))
            finally:
                if not self._is_decided:
                    self.give_up(tr("the launcher failed; read what it printed"))

    def _hand_over(self, stack: ExitStack) -> None:
        servers = [
            stack.enter_context(closing(self._connect(endpoint, rank))) for rank, endpoint in enumerate(self._before)
        ]
        stack.callback(self._go_back, servers)
        states = self._stop(servers)
        self._write(servers, states)
        self._enter(HandOverPhase.LOAD)
        for rank, endpoint in enumerate(self._after):
            self._wait_for(endpoint, rank)
        self._enter(HandOverPhase.READY)
        with self._changed:
            self._changed.wait_for(lambda: self._is_decided)

    def _go_back(self, servers: Sequence[Connection]) -> None:
        """Let the old servers continue, unless the job has the new ones."""
        if self._is_committed:
            return
        if self._is_frozen:
            self._fence_lost()
        self._let_go(servers)
        self._await_files(servers)

    def _fence_lost(self) -> None:
        with self._changed:
            lost = [{"worker": worker, "workers": self._workers, "token": self._token} for worker in self._lost]
        for about in lost:
            for rank, endpoint in enumerate(self._before):
                try:
                    with closing(self._connect(endpoint, rank)) as server:
                        server.call("fence", about)
                except PhalanxError as error:
                    logger.warning("server %d was not told that worker %d is lost: %s", rank, about["worker"], error)

    def _let_go(self, servers: Sequence[Connection]) -> None:
        """Let changes continue. Who does not answer is asked over other connections: nothing else ends its freeze."""
        left = resume_all(servers, self._token)
        while left:
            with self._changed:
                is_last = self._changed.wait_for(lambda: self._is_stopped, _BETWEEN_TRIES_S)
            left = [rank for rank in left if not self._resume(rank)]
            if is_last:
                return

    def _resume(self, rank: int) -> bool:
        try:
            with closing(self._connect(self._before[rank], rank)) as server:
                server.call("resume", {"token": self._token})
        except PhalanxError:
            return False
        return True

    def _await_files(self, servers: Sequence[Connection]) -> None:
        """Wait until no server writes its tables any more: who gave the change up deletes their folder."""
        if self.phase is HandOverPhase.WRITE:
            for server in servers:
                with suppress(PhalanxError):
                    collect_results([server], self._token)

    def _stop(self, servers: Sequence[Connection]) -> list[dict[str, Any]]:
        """Hold all changes back where all servers have the same pushes, and return their states."""
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self._try_to_stop(servers)
            except _NoMomentError as error:
                why = str(error)
            except LaunchError:
                raise
            except ConfigError:
                why = tr("a snapshot is being saved")
            resume_all(servers, self._token)
            self._is_frozen = False
            if time.monotonic() > until:
                raise LaunchError(
                    tr(
                        "The servers came to no common moment within {seconds:g} s: {why}. Ask again when the workers "
                        "train.",
                        seconds=PATIENCE_S,
                        why=why,
                    )
                )
            self._pause(_BETWEEN_TRIES_S)

    def _try_to_stop(self, servers: Sequence[Connection]) -> list[dict[str, Any]]:
        until = time.monotonic() + _TRY_S
        freeze = {"token": self._token, "seconds": _HOLD_S, "hold": True}
        self._is_frozen = True
        moments = ask_all(servers, "freeze", freeze)
        if len({len(moment["steps"]) for moment in moments}) > 1:
            raise _NoMomentError(tr("the first worker has not come to all of them"))
        steps = furthest_steps(moments)
        if steps and min(steps) >= LEFT:
            raise LaunchError(tr("The workers of this job have left, and its servers end. There is nothing to change."))
        while late := _late_workers(moments, steps):
            if time.monotonic() > until:
                raise _NoMomentError(
                    tr("they wait for a push of workers {late}, which another worker or server has", late=late)
                )
            self._pause(_LOOK_S)
            moments = ask_all(servers, "freeze", {**freeze, "steps": steps})
        states = [reply["state"] for reply in ask_all(servers, "state", {"token": self._token})]
        if part := difference(states):
            raise _NoMomentError(tr("they have not settled {part}", part=part))
        return states

    def _write(self, servers: Sequence[Connection], states: Sequence[Mapping[str, Any]]) -> None:
        self._enter(HandOverPhase.WRITE)
        files = self._folder / "files"
        files.mkdir(parents=True)
        request = {"token": self._token, "directory": str(files), "save": self._token, "mode": "full"}
        ask_all(servers, "snapshot", request)
        written = [self._result_of(server) for server in servers]
        write_bases(self._folder, len(self._after), job=self._job, files=files, states=states, written=written)
        files.rmdir()

    def _result_of(self, server: Connection) -> dict[str, Any]:
        """Wait until a server has written its tables, and return what it wrote."""
        request = {"save": self._token, "wait_s": _SAVED_S}
        while not (answer := server.call("saved", request).meta)["done"]:
            self._pause(0.0)
        return dict(answer["result"])

    def _wait_for(self, endpoint: str, rank: int) -> None:
        """Wait until a new server has its tables."""
        until = time.monotonic() + _LISTEN_S
        while True:
            self._pause(_LOOK_S)
            try:
                with closing(self._connect(endpoint, rank)) as server:
                    until = time.monotonic() + _LISTEN_S
                    server.call("report", {})
                return
            except PeerLostError:  # it is not there yet; the launcher sees one that ends
                if time.monotonic() > until:
                    raise LaunchError(
                        tr(
                            "new server {rank} did not listen for {seconds:g} s; read what it printed",
                            rank=rank,
                            seconds=_LISTEN_S,
                        )
                    ) from None

    def _connect(self, endpoint: str, rank: int) -> Connection:
        return Connection(
            endpoint,
            secret=self._secret,
            me="launcher",
            peer=f"server {rank}",
            timeout_s=_ANSWER_S,
            connect_s=_CONNECT_S,
        )

    def _enter(self, phase: HandOverPhase) -> None:
        with self._changed:
            self._check_undecided()
            self._phase = phase

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_decided, seconds)
            self._check_undecided()

    def _check_undecided(self) -> None:
        if self._is_decided:
            raise LaunchError(self._failure)


class _NoMomentError(LaunchError):
    """The servers do not have the same pushes now."""


def _late_workers(moments: Sequence[Mapping[str, Any]], steps: Sequence[int]) -> list[int]:
    """Return the workers whose pushes up to these steps are not on all servers, or not yet in the tables of all."""

    def least(count: str) -> list[int]:
        return [min(of_worker) for of_worker in zip(*(moment[count] for moment in moments), strict=True)]

    reached, applied = least("steps"), least("pushed")
    late = [worker for worker, step in enumerate(steps) if reached[worker] < step]
    # In mode sync a push is in the tables once those of all workers are.
    return late or [worker for worker, step in enumerate(steps) if applied[worker] < step < LEFT]
