"""Real parameter servers for a test, `with servers(2) as made:`, and workers of one server over sockets.

Each server is a process of its own, forked like the ranks of `ranks.py`, at a port that the system chose; a test may
kill it and start it again at its address. At the end of the block every server is ended; one that failed without the
test asking for its end shows its log.
"""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import ranks
from phalanx.cluster.role.role import Role
from phalanx.ps.snapshot.records import Record
from phalanx.ps.wire.client.connection import Connection
from phalanx.ps.wire.data_frame import DataReply, DataRequest
from phalanx.ps.wire.message import Pending, RpcReply
from ps_requests import FakeWorker

SECRET = bytes(range(32))
"""The secret of every test's job."""


class Server:
    """One server's process. Its socket stays here, as with the launcher, so that it keeps its address."""

    def __init__(self, rank: int, servers: int, folder: Path, env: Mapping[str, str], **options: Any) -> None:
        self._bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._bound.bind(("127.0.0.1", 0))
        self.endpoint = "127.0.0.1:" + str(self._bound.getsockname()[1])
        self._log = folder / f"serverlog.{rank}"
        self._env, self._options = env, options
        self._role = Role(kind="server", rank=rank, world_size=servers, endpoint=self.endpoint, job_id="test")
        self.process: BaseProcess | None = None
        self._was_seen = False

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def pid(self) -> int:
        assert self.process is not None
        assert self.process.pid is not None
        return self.process.pid

    def start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(ranks.PRELOAD)
        arguments = (self._role, self._bound, str(self._log), dict(self._env), self._options)
        self.process = context.Process(target=_serve, args=arguments, name=f"server {self._role.rank}")
        with ranks.bare_main():
            self.process.start()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.join()

    def end(self, seconds: float = 20.0) -> int | None:
        """Wait for the end of the process and return its exit code."""
        assert self.process is not None
        self._was_seen = True
        self.process.join(seconds)
        assert self.process.exitcode is not None, self.log
        return self.process.exitcode

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def close(self) -> str:
        """End the process; returns what it said if it had failed, unseen."""
        code = None
        if self.process is not None:
            self.process.kill()
            self.process.join()
            code = self.process.exitcode
            self.process.close()
        self._bound.close()
        failed = code not in (None, 0, -signal.SIGKILL) and not self._was_seen
        return f"server {self._role.rank} ended with {code}:\n{self.log}" if failed else ""


class Servers(list[Server]):
    """Servers by rank."""

    @property
    def endpoints(self) -> list[str]:
        """`host:port` of each."""
        return [server.endpoint for server in self]


@contextmanager
def servers(
    count: int = 1,
    folder: Path | None = None,
    env: Mapping[str, str] | None = None,
    *,
    state: bool = False,
    started: bool = True,
    **options: Any,
) -> Iterator[Servers]:
    """Run servers; they listen as soon as they can, clients wait for them.

    Args:
        count: How many.
        folder: Where their logs go, and with `state` what they keep for a restart; one of their own when None.
        env: Variables added to their environment.
        state: Whether they keep state.
        started: Whether they run when the block begins; else the test starts them.
        options: Go to `run`; but `released`, a file: until it is there, each record that a recovery reads from a log
            takes half a second.

    Raises:
        AssertionError: If a server failed by itself; with its log.
    """
    with tempfile.TemporaryDirectory(prefix="phalanx-servers-") as own:
        where = folder or Path(own)
        made = Servers(
            Server(n, count, where, env or {}, **options, **({"directory": str(where / str(n))} if state else {}))
            for n in range(count)
        )
        try:
            for server in made if started else ():
                server.start()
            yield made
        finally:
            failures = [said for server in made if (said := server.close())]
        assert not failures, "\n".join(failures)


def _serve(role: Role, bound: socket.socket, log: str, env: dict[str, str], options: dict[str, Any]) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s", force=True)
    faulthandler.enable()
    os.environ.update(env, PHALANX_ENDPOINT_FD=str(bound.detach()))
    if released := options.pop("released", None):
        _slow_down_recovery(released)
    from phalanx.ps.server.main import run

    run(role, secret=SECRET, **options)


def _slow_down_recovery(released: Path) -> None:
    from phalanx.ps.server import recovery

    replay = recovery.replay

    def slow_replay(directory: Path, first: int) -> Iterator[Record]:
        for record in replay(directory, first):
            if not released.exists():
                time.sleep(0.5)
            yield record

    recovery.replay = slow_replay


class Worker(FakeWorker):
    """A worker of one server, over a real connection."""

    def __init__(self, server: Server, worker: int = 0, *, rank: int = 0, retry_s: float = 0.0) -> None:
        super().__init__(None, worker)  # type: ignore[arg-type]
        self.connection = Connection(
            server.endpoint,
            secret=SECRET,
            me=f"worker {worker}",
            peer=f"server {rank}",
            client=100 + worker,
            timeout_s=30.0,
            retry_s=retry_s,
        )

    def call(self, op: str, meta: dict[str, Any], arrays: Any = (), *, seq: int | None = None) -> RpcReply:
        return self.connection.call(op, meta, arrays)

    def ask(self, request: DataRequest, *, seq: int | None = None) -> DataReply:
        reply: DataReply = self.connection.post(request).result()
        return reply

    def send(self, op: str, meta: Mapping[str, Any]) -> Pending:  # type: ignore[override]
        return self.connection.send(op, meta)

    def close(self) -> None:
        self.connection.close()
