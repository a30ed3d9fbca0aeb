"""`RollingRestart`: start the parameter servers of this host again, one after the other, while workers train."""

from __future__ import annotations

import json
import logging
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from phalanx.errors import LaunchError
from phalanx.i18n import tr
from phalanx.launch.process import environment
from phalanx.launch.process.environment import JobFacts
from phalanx.launch.request.topology import Process, Topology

logger = logging.getLogger("phalanx.launch")

RESTART_SIGNAL = signal.SIGUSR1
"""What has a server write a base of its state and end."""


class SendSignal(Protocol):
    """Sends a signal to processes by their ids, each with all that it has started, or alone."""

    def __call__(self, names: Sequence[str], number: int, *, is_group: bool = True) -> None:
        """Send it."""
        ...


@dataclass(slots=True)
class _Turn:
    """One server's restart."""

    server: Process
    since: float
    """Monotonic clock."""

    ended_at: float = 0.0
    """Seconds since the epoch; 0 while its process of before runs."""

    is_killed: bool = False


class RollingRestart:
    """Asks one server at a time to end; the next one when that reports again.

    A server first writes a base, so that it recovers without its log. It ends as in a crash: what it answered is in
    base and log, and what it did not answer comes again. Workers wait for it as they do after a crash. Servers whose
    workers have left end by themselves, and are not asked to.

    Args:
        layout: The job, of which this restarts the servers of this host.
        facts: Further facts of it.
        send: Sends a signal to processes.
        patience_s: How long a server may take to end. It is killed then, and recovers with its log.
        has_workers: Whether there are workers that train.
    """

    def __init__(
        self,
        layout: Topology,
        facts: JobFacts,
        send: SendSignal,
        patience_s: float,
        *,
        has_workers: Callable[[], bool],
    ) -> None:
        self._servers = [process for process in layout.local if process.role == "server"]
        self._status_files = environment.server_status_files(layout, facts.log_dir)
        self._can_restart = bool(self._servers and facts.server_dir and facts.max_restarts)
        self._send, self._patience_s, self._has_workers = send, patience_s, has_workers
        self._waiting: list[Process] = []
        self._turn: _Turn | None = None
        self._back: list[Process] = []
        self._has_ended = False
        """Whether a server ended well, which all do once the workers have left."""

    def answer(self, command: dict[str, Any]) -> str:
        """Begin; or say how far it is, which is "" once it is over; or name the servers that are back.

        Raises:
            LaunchError: If it is another command, there is nothing to start servers again from, the workers have left,
                or a restart is under way.
        """
        if not self._can_restart:
            raise LaunchError(
                tr(
                    "This job has no servers on this host that can be started again. Start it with --max-restarts 1, "
                    "or more, and ask on the host of the servers."
                )
            )
        if command == {"servers": "restart"}:
            return self._begin()
        if command == {"servers": "progress"}:
            return self.progress
        if command == {"servers": "restarted"}:
            return _titles(self._back)
        raise LaunchError(
            tr(
                "{command} is no command of this job. Known: servers, with restart, progress, restarted, scale, "
                "scaling or scaled.",
                command=command,
            )
        )

    def poll(self) -> None:
        """Continue with what is under way. Called every few moments."""
        if (self._waiting or self._turn) and not self._has_workers():
            self._abandon()
        if self._turn is None:
            if self._waiting:
                self._ask(self._waiting.pop(0))
            return
        turn, taken_s = self._turn, time.monotonic() - self._turn.since
        if not turn.ended_at:
            if taken_s > self._patience_s and not turn.is_killed:
                logger.warning("%s did not end within %g s, and is killed", turn.server.title, self._patience_s)
                turn.is_killed = True
                self._send([turn.server.id], signal.SIGKILL)
        elif _reported_at(self._status_files[turn.server.id]) > turn.ended_at:
            logger.info("%s is back after %.1f s", turn.server.title, taken_s)
            self._back.append(turn.server)
            self._turn = None

    def take_end(self, process: Process, *, failed: bool) -> bool:
        """Return whether a process ended because it was asked to here, and is to be started again.

        A server that ended well did so because all workers had left: the others end too, and none is started again.
        """
        if process.role == "server" and not failed:
            self._has_ended = True
            self._abandon()
        if self._turn is None or self._turn.server is not process or self._turn.ended_at:
            return False
        self._turn.ended_at = time.time()
        return True

    def _begin(self) -> str:
        if progress := self.progress:
            raise LaunchError(
                tr("The servers are being started again: {progress}. Wait until they are back.", progress=progress)
            )
        if self._has_ended or not self._has_workers():
            raise LaunchError(
                tr("The workers of this job have left, and its servers end. There is nothing to start again.")
            )
        self._waiting, self._back = [*self._servers], []
        logger.info("phalanx restart-servers: %s, one after the other", _titles(self._servers))
        return _titles(self._servers)

    def _abandon(self) -> None:
        """Ask no more servers to end: the workers have left."""
        left = [*([self._turn.server] if self._turn else []), *self._waiting]
        if left:
            logger.warning("phalanx restart-servers: the workers have left before these were back: %s", _titles(left))
        self._turn, self._waiting = None, []

    def _ask(self, server: Process) -> None:
        self._turn = _Turn(server, time.monotonic())
        # What its script has started knows nothing of this signal, and would end by it.
        self._send([server.id], RESTART_SIGNAL, is_group=False)

    @property
    def progress(self) -> str:
        """How far a restart is; empty where none is under way."""
        if self._turn is None:
            return f"{len(self._waiting)} of {len(self._servers)} wait" if self._waiting else ""
        does = "recovers" if self._turn.ended_at else "writes its state"
        return f"{self._turn.server.title} {does}, {len(self._waiting)} of {len(self._servers)} wait"


def _titles(servers: Sequence[Process]) -> str:
    return ", ".join(server.title for server in servers)


def _reported_at(status_file: str) -> float:
    """Return when a server last reported, in seconds since the epoch; 0 if it never did."""
    try:
        return float(json.loads(Path(status_file).read_text(encoding="utf-8"))["time"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0
