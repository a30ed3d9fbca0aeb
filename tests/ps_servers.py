"""Real parameter servers for a test: `with servers(2, workers=2) as endpoints:`.

Each server is a process of its own, forked like the ranks of `ranks.py`, at a port that the system chose. At the end of
the block every server is ended; one that failed before shows its log.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import multiprocessing
import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

import ranks

SECRET = bytes(range(32))
"""The secret of every test's job."""


class Endpoints(list[str]):
    """`host:port` of each server by rank, and the processes behind them."""

    def __init__(self, endpoints: list[str], workers: int, env: Mapping[str, str], folder: Path) -> None:
        super().__init__(endpoints)
        self.processes: list[BaseProcess] = []
        self._workers, self._env = workers, dict(env)
        self._logs = [folder / f"serverlog.{rank}" for rank in range(len(endpoints))]

    def log(self, rank: int) -> str:
        """Return what a server has written so far."""
        return self._logs[rank].read_text(errors="replace")

    def start(self, rank: int, bound: socket.socket, attempt: int = 0) -> BaseProcess:
        """Start a server at the socket bound for it."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(ranks.PRELOAD)
        env = {**self._env, "PHALANX_ATTEMPT": str(attempt)}
        arguments = (rank, list(self), self._workers, bound, str(self._logs[rank]), env)
        process = context.Process(target=_serve, args=arguments, name=f"server {rank}")
        with ranks.bare_main():
            process.start()
        bound.close()
        return process

    def kill_and_restart(self, rank: int) -> None:
        """Kill a server without a word, and start it again at its address, as the launcher does."""
        self.processes[rank].kill()
        self.processes[rank].join()
        self.processes[rank].close()
        self.processes[rank] = self.start(rank, _bound(int(self[rank].rpartition(":")[2])), attempt=1)


@contextlib.contextmanager
def servers(n: int = 1, *, workers: int = 1, env: Mapping[str, str] | None = None) -> Iterator[Endpoints]:
    """Run `n` servers for `workers` workers; they listen as soon as they can, clients wait for them.

    A server ends by itself once every worker that declared tables has left: read rows before that.

    Args:
        n: Number of servers.
        workers: Number of workers.
        env: Variables added to the servers' environment; `{rank}` in a value is the server's rank.

    Raises:
        AssertionError: If a server failed by itself; with its log.
    """
    bound = [_bound() for _ in range(n)]
    addresses = [f"127.0.0.1:{made.getsockname()[1]}" for made in bound]
    with tempfile.TemporaryDirectory(prefix="phalanx-servers-") as folder:
        endpoints = Endpoints(addresses, workers, env or {}, Path(folder))
        try:
            for rank, made in enumerate(bound):
                endpoints.processes.append(endpoints.start(rank, made))
            yield endpoints
        finally:
            codes = [_end(process) for process in endpoints.processes]
        for rank, code in enumerate(codes):
            assert code in (0, -15, -9), f"server {rank} ended with {code}:\n{endpoints.log(rank)}"


def _bound(port: int = 0) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind(("127.0.0.1", port))
    return made


def _serve(
    rank: int, endpoints: list[str], workers: int, bound: socket.socket, log: str, env: Mapping[str, str]
) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s", force=True)
    faulthandler.enable()
    os.environ.update({name: value.replace("{rank}", str(rank)) for name, value in env.items()})
    os.environ["PHALANX_ENDPOINT_FD"] = str(bound.detach())
    from phalanx.cluster.role import Role
    from phalanx.ps.server.main import run

    role = Role(
        kind="server",
        rank=rank,
        world_size=len(endpoints),
        endpoint=endpoints[rank],
        server_endpoints=tuple(endpoints),
        worker_endpoints=tuple(f"127.0.0.1:{20000 + worker}" for worker in range(workers)),
        job_id="test",
        attempt=int(env["PHALANX_ATTEMPT"]),
        launcher="phalanx",
        secret=SECRET,
    )
    run(role, secret=SECRET)


def _end(process: BaseProcess) -> int | None:
    process.terminate()
    process.join(5.0)
    if process.is_alive():
        process.kill()
        process.join()
    code = process.exitcode
    process.close()
    return code
