"""`ServerCommands`: `phalanx restart-servers` and `phalanx scale-servers`, one of them at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from phalanx.errors import LaunchError
from phalanx.i18n import tr
from phalanx.launch.job.servers.rolling_restart import RollingRestart
from phalanx.launch.job.servers.scaling import ServerScaling
from phalanx.launch.job.start import Starter
from phalanx.launch.reports.logs import append_event
from phalanx.launch.request.topology import Process


class ServerCommands:
    """The commands about the servers of an attempt on this host.

    Args:
        starter: Starts the processes of the attempt.
        patience_s: How long a server may take to end that is started again.
        has_workers: Whether there are workers that train.
        start: Starts a process, with this starter.
        adopt: Called when the job has other servers; see `ServerScaling`.
        publish: Called with how far a change of their number is, and with "" when it is over.
    """

    def __init__(
        self,
        starter: Starter,
        *,
        patience_s: float,
        has_workers: Callable[[], bool],
        start: Callable[[Process, Starter], None],
        adopt: Callable[[Starter], None],
        publish: Callable[[str], None],
    ) -> None:
        self._patience_s, self._has_workers, self._adopt = patience_s, has_workers, adopt
        self._send = starter.server.signal
        self._rolling = self._restart_of(starter)
        self._scaling = ServerScaling(
            starter=starter,
            start=start,
            send=self._send,
            adopt=self._adopt_servers,
            has_workers=has_workers,
            record=partial(append_event, starter.facts.log_dir),
            publish=publish,
        )

    def answer(self, command: dict[str, Any], obstacle: str = "") -> str:
        """Do what a command asks for.

        Args:
            command: `{"servers": ...}`: restart, progress, restarted; scale, with a `count`, scaling, scaled.
            obstacle: Why the number of servers cannot be changed now; empty for nothing.

        Raises:
            LaunchError: If it cannot be done; gives the reason.
        """
        operation = command.get("servers")
        if operation == "scale":
            if progress := self._rolling.progress:
                obstacle = tr(
                    "The servers are being started again: {progress}. Wait until they are back.", progress=progress
                )
            return self._scaling.begin(command.get("count"), obstacle)
        if operation == "scaling":
            return self._scaling.progress
        if operation == "scaled":
            return self._scaling.outcome
        if operation == "restart" and self.busy:
            raise LaunchError(self.busy)
        return self._rolling.answer(command)

    @property
    def busy(self) -> str:
        """Why the workers' pushes are held back, or soon may be; empty where the number of servers stays."""
        return self._scaling.busy

    def poll(self) -> None:
        """Continue with what is under way. Called every few moments."""
        self._rolling.poll()
        self._scaling.poll()

    def take_end(self, process: Process, *, failed: bool) -> bool:
        """Return whether a process ended because it was asked to, and is to be started again."""
        return self._rolling.take_end(process, failed=failed)

    def is_spare(self, process: Process, ended: str, *, failed: bool) -> bool:
        """Take notice that a process ended, and how; returns whether it was a server, but none of the job's."""
        return self._scaling.take_end(process, ended, failed=failed)

    def stop(self) -> None:
        """Give up what is under way: the attempt ends."""
        self._scaling.stop()

    def delete_rest(self) -> None:
        """Delete what a change that was under way at `stop` has left; all processes have ended."""
        self._scaling.delete_rest()

    def _restart_of(self, starter: Starter) -> RollingRestart:
        return RollingRestart(
            starter.layout, starter.facts, self._send, self._patience_s, has_workers=self._has_workers
        )

    def _adopt_servers(self, starter: Starter) -> None:
        self._rolling = self._restart_of(starter)
        self._adopt(starter)
