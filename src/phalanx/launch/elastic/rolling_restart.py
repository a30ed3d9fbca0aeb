"""`RollingRestart`: start the parameter servers of this host again, one after the other, while workers train."""

from __future__ import annotations

import json
import logging
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import LaunchError
from phalanx.launch.process import environment
from phalanx.launch.process.environment import JobFacts
from phalanx.launch.request.topology import Process, Topology

logger = logging.getLogger("phalanx.launch")

RESTART_SIGNAL = signal.SIGUSR1
"""What has a server write a base of its state and end."""


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
    base and log, and what it did not answer comes again. Workers wait for it as they do after a crash.

    Args:
        layout: The job, of which this restarts the servers of this host.
        facts: Further facts of it.
        send: Sends a signal to processes, by their ids.
        patience_s: How long a server may take to end. It is killed then, and recovers with its log.
    """

    def __init__(
        self,
        layout: Topology,
        facts: JobFacts,
        send: Callable[[Sequence[str], int], None],
        patience_s: float,
    ) -> None:
        self._servers = [process for process in layout.local if process.role == "server"]
        self._status_files = environment.server_status_files(layout, facts.log_dir)
        self._can_restart = bool(self._servers and facts.server_dir and facts.max_restarts)
        self._send, self._patience_s = send, patience_s
        self._waiting: list[Process] = []
        self._turn: _Turn | None = None

    def answer(self, command: dict[str, Any]) -> str:
        """Begin, or say how far it is, which is "" once all servers are back.

        Raises:
            LaunchError: If it is another command, there is nothing to start servers again from, or a restart is under
                way.
        """
        if not self._can_restart:
            raise LaunchError(
                "This job has no servers on this host that can be started again. Start it with --max-restarts 1, or "
                "more, and ask on the host of the servers."
            )
        if command == {"servers": "restart"}:
            return self._begin()
        if command == {"servers": "progress"}:
            return self._progress()
        raise LaunchError(f"{command} is no command of this job. Known: servers, with restart or progress.")

    def poll(self) -> None:
        """Go on with what is under way. Called every few moments."""
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
            self._turn = None

    def take_end(self, process: Process, *, failed: bool) -> bool:
        """Return whether a process ended because it was asked to here, and is to be started again.

        A server that ended well did so because all workers had left: the others end too, and none is started again.
        """
        if self._turn is None or self._turn.server is not process or self._turn.ended_at:
            return False
        if not failed:
            self._turn, self._waiting = None, []
            return False
        self._turn.ended_at = time.time()
        return True

    def _begin(self) -> str:
        if progress := self._progress():
            raise LaunchError(f"The servers are being started again: {progress}. Wait until they are back.")
        self._waiting = [*self._servers]
        names = ", ".join(server.title for server in self._servers)
        logger.info("phalanx restart-servers: %s, one after the other", names)
        return names

    def _ask(self, server: Process) -> None:
        self._turn = _Turn(server, time.monotonic())
        self._send([server.id], RESTART_SIGNAL)

    def _progress(self) -> str:
        if self._turn is None:
            return f"{len(self._waiting)} of {len(self._servers)} wait" if self._waiting else ""
        does = "recovers" if self._turn.ended_at else "writes its state"
        return f"{self._turn.server.title} {does}, {len(self._waiting)} of {len(self._servers)} wait"


def _reported_at(status_file: str) -> float:
    """Return when a server last reported, in seconds since the epoch; 0 if it never did."""
    try:
        return float(json.loads(Path(status_file).read_text(encoding="utf-8"))["time"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0
