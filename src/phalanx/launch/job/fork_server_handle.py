"""`ForkServerHandle`: the launcher's client of the fork server: spawn, signal and wait for processes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import phalanx
from phalanx.errors import LaunchError, PeerLostError
from phalanx.launch.process import wire

_BOOT = "import sys; sys.path.append({root!r}); from phalanx.launch.process.fork_server import main; main()"


def start_process(fd: int) -> int:
    """Start the fork server in a process group of its own, with `fd` as its end of the socket; return its pid."""
    root = str(Path(phalanx.__file__).parents[1])
    # -P: a random.py in the user's folder must not become the standard library's.
    command = [sys.executable, "-P", "-c", _BOOT.format(root=root)]
    actions = [(os.POSIX_SPAWN_DUP2, fd, wire.SERVER_FD)]
    return os.posix_spawn(sys.executable, command, os.environ, file_actions=actions, setpgroup=0)


class ForkServerLostError(PeerLostError):
    """The fork server died, and every process of the job on this host with it."""


class ForkServerHandle:
    """A running fork server; one per process, which must have no other children.

    Closing it, or the death of this process, ends the server and everything it started.
    """

    def __init__(self) -> None:
        """Start the server; it waits for `configure` before it loads a library that reads the environment."""
        self._environment: dict[str, str] = {}
        self._preload: Sequence[str] = ()
        self._boot()

    def _boot(self) -> None:
        self.socket, theirs = wire.pair()
        self._has_children = False
        self._has_ended = False
        with theirs:
            self.pid = start_process(theirs.fileno())
        from phalanx.launch.process import linux

        # Should the server itself be killed, what its children left behind comes to us.
        linux.adopt_orphans()

    def configure(self, environment: dict[str, str], *, preload: Sequence[str]) -> None:
        """Fix the environment in which libraries are loaded, and let the server load these modules."""
        self._environment, self._preload = environment, preload
        self._send({"configure": environment, "preload": list(preload)})

    def restart(self) -> None:
        """Start another server in place of one that died, in the environment of the first."""
        self.close()
        self._boot()
        self.configure(self._environment, preload=self._preload)

    def spawn(self, name: str, target: str, fds: Sequence[int] = (), **details: Any) -> None:
        """Ask for a child; the answer comes as an event. `fds` stay open here."""
        self._has_children = True
        self._send({"spawn": name, "target": target, **details}, fds)

    def signal(self, names: Sequence[str], number: int, *, is_group: bool = True) -> None:
        """Send a signal to the process groups of these children, or to them alone."""
        self._send({"signal": int(number), "ids": list(names), "is_group": is_group})

    def _send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        # When the server is gone, `receive` tells, and that is where it is dealt with.
        with contextlib.suppress(BrokenPipeError):
            wire.send(self.socket, message, fds)

    def receive(self) -> dict[str, Any]:
        """Return the next event. Blocks.

        Raises:
            LaunchError: If torch cannot be imported.
            ForkServerLostError: If the server is gone; says how it ended.
        """
        answer = wire.receive(self.socket)
        if answer is None:
            from phalanx.launch.reports import report

            _, status = os.waitpid(self.pid, 0)
            self._has_ended = True
            raise ForkServerLostError(report.fork_server_lost(self.pid, os.waitstatus_to_exitcode(status)))
        if "fatal" in answer[0]:
            raise LaunchError(answer[0]["fatal"])
        return answer[0]

    def close(self) -> None:
        """End the server and wait until it and everything below it is gone."""
        self.socket.close()
        if not self._has_children and not self._has_ended:
            # It may be in the middle of importing torch, and there is nothing to clean up.
            os.kill(self.pid, signal.SIGKILL)
        if not self._has_ended:
            os.waitpid(self.pid, 0)
        from phalanx.launch.process import linux

        linux.kill_descendants()
