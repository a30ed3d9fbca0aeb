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

    def __init__(self, endpoints: list[str], processes: list[BaseProcess], logs: list[Path]) -> None:
        super().__init__(endpoints)
        self.processes = processes
        self._logs = logs

    def log(self, rank: int) -> str:
        """Return what a server has written so far."""
        return self._logs[rank].read_text(errors="replace")


@contextlib.contextmanager
def servers(n: int = 1, *, workers: int = 1, env: Mapping[str, str] | None = None) -> Iterator[Endpoints]:
    """Run `n` servers for `workers` workers; they listen as soon as they can, clients wait for them.

    A server ends by itself once every worker that declared tables has left: read rows before that.

    Args:
        n: Number of servers.
        workers: Number of workers.
        env: Variables added to the servers' environment.

    Raises:
        AssertionError: If a server failed by itself; with its log.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(ranks.PRELOAD)
    bound = [_bound() for _ in range(n)]
    endpoints = ["127.0.0.1:" + str(made.getsockname()[1]) for made in bound]
    with tempfile.TemporaryDirectory(prefix="phalanx-servers-") as folder:
        logs = [Path(folder) / f"serverlog.{rank}" for rank in range(n)]
        processes: list[BaseProcess] = []
        try:
            for rank, made in enumerate(bound):
                arguments = (rank, endpoints, workers, made, str(logs[rank]), dict(env or {}))
                process = context.Process(target=_serve, args=arguments, name=f"server {rank}")
                with ranks.bare_main():
                    process.start()
                made.close()
                processes.append(process)
            yield Endpoints(endpoints, processes, logs)
        finally:
            codes = [_end(process) for process in processes]
        for rank, code in enumerate(codes):
            assert code in (0, -15, -9), f"server {rank} ended with {code}:\n{logs[rank].read_text(errors='replace')}"


def _bound() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind(("127.0.0.1", 0))
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
    os.environ.update(env, PHALANX_ENDPOINT_FD=str(bound.detach()))
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
