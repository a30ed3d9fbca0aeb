"""`ForkServer`: a process with torch imported, where the script needs it, that forks every rank.

It has one thread, forks from it, and never touches CUDA. It serves one launcher over one socket; when that socket
closes, for whatever reason, it kills everything it ever started, and what that started, and ends.

    launcher -> server   {"configure": {name: value}, "preload": [...]}   environment, before libraries are loaded;
                                                                          modules to import
                         {"spawn": id, "target": ..., ...} + descriptors   see `entry.run_child`
                         {"signal": number, "ids": [...], "is_group": b}   to the process groups of these, or them alone
    server -> launcher   {"spawned": id, "pid": n}
                         {"exited": id, "status": wait status, "time": seconds since the epoch}
                         {"fatal": text}                                   torch cannot be imported
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from typing import Any, NoReturn

from phalanx.launch.process import linux, wire
from phalanx.launch.process.wire import SERVER_FD


class ForkServer:
    """State of the server: which of its children is which."""

    def __init__(self, launcher: socket.socket) -> None:
        self._launcher = launcher
        self._ids: dict[int, str] = {}
        self._pids: dict[str, int] = {}
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> None:
        """Answer the launcher until it is gone, then leave nothing behind."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        try:
            while self._serve_once():
                pass
        except BrokenPipeError:
            pass  # The launcher went away between two messages: the same as its socket closing.
        finally:
            linux.kill_descendants()

    def _serve_once(self) -> bool:
        launcher = self._launcher.fileno()
        readable, _, _ = select.select([launcher, self._woken], [], [])
        if self._woken in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, 4096)
            self._report_exits()
        if launcher in readable:
            request = wire.receive(self._launcher)
            if request is None:
                return False
            self._answer(*request)
        return True

    def _answer(self, message: dict[str, Any], fds: list[int]) -> None:
        if "spawn" in message:
            self._spawn(message, fds)
        elif "signal" in message:
            send = os.killpg if message["is_group"] else os.kill
            for name in message["ids"]:
                # A child that ended is unreaped or already reported; either way there is no one to tell.
                with contextlib.suppress(KeyError, ProcessLookupError):
                    send(self._pids[name], message["signal"])

    def _spawn(self, message: dict[str, Any], fds: list[int]) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_child(parent, message, fds)
        # Both sides set the group, so that it exists whoever runs first.
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)
        for fd in fds:
            os.close(fd)
        self._ids[pid] = message["spawn"]
        self._pids[message["spawn"]] = pid
        wire.send(self._launcher, {"spawned": message["spawn"], "pid": pid})

    def _become_child(self, parent: int, message: dict[str, Any], fds: list[int]) -> NoReturn:
        signal.set_wakeup_fd(-1)
        os.setpgid(0, 0)
        linux.die_with_parent(parent)
        for fd in (self._launcher.detach(), self._woken, self._wake):
            os.close(fd)
        from phalanx.launch.process.entry import run_child

        run_child(message, fds)

    def _report_exits(self) -> None:
        for pid, status in linux.reap():
            name = self._ids.pop(pid, None)
            if name is None:
                continue  # An orphan of a child, adopted and now gone.
            del self._pids[name]
            wire.send(self._launcher, {"exited": name, "status": status, "time": time.time()})


def main() -> None:
    """Run the server on the socket at `SERVER_FD`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        # The launcher decides when the job ends; signals for the whole terminal must not take its hands away.
        signal.signal(number, signal.SIG_IGN)
    launcher = socket.socket(fileno=SERVER_FD)
    launcher.set_inheritable(False)
    linux.adopt_orphans()
    from phalanx.launch import preload
    from phalanx.launch.process import entry  # noqa: F401 -- for all children

    preload.warm_up(until=lambda: bool(select.select([launcher.fileno()], [], [], 0)[0]))
    first = wire.receive(launcher)
    if first is None:
        return
    os.environ.update(first[0]["configure"])
    try:
        preload.preload(first[0]["preload"])
    except ImportError as error:
        wire.send(launcher, {"fatal": f"torch cannot be imported: {error}"})
        return
    ForkServer(launcher).serve()
    # The launcher waits for this process, and the interpreter would take torch apart for half a second first.
    os._exit(0)
