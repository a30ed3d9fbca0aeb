"""`ServerProcess`: a parameter server in a process of its own, which can be killed and started again at its address."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

from phalanx.cluster import proc
from phalanx.cluster.role.role import Role


class ServerProcess:
    """A server of a job on this host; it serves until it is closed.

    Args:
        secret: The job's secret.
        folder: Where it keeps its state; in memory only when None.
        rank: Its number.
        servers: How many there are.
    """

    def __init__(self, secret: bytes, folder: Path | None = None, rank: int = 0, servers: int = 1) -> None:
        self._secret, self._folder, self._rank, self._servers = secret, folder, rank, servers
        self.endpoint = "127.0.0.1:0"
        self.start()

    def start(self) -> None:
        """Start it; returns when it listens."""
        context = multiprocessing.get_context("spawn")
        near, far = context.Pipe()
        arguments = (far, self._secret, self._folder, self.endpoint, self._rank, self._servers)
        self._process = context.Process(target=_serve, args=arguments, name=f"server {self._rank}")
        self._process.start()
        far.close()  # so that the end of a server that fails is the end of the pipe
        self.endpoint = near.recv()

    def restart_from_base(self) -> None:
        """Have it write a base snapshot and end, as in a rolling restart, and start it again."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGUSR1)
        self._process.join()
        self.start()

    @property
    def cpu_seconds(self) -> float:
        """Processor time it has used, that of the system for it too."""
        assert self._process.pid is not None
        return time.clock_gettime(~self._process.pid << 3 | 2)  # clock_getcpuclockid(3); /proc counts in 10 ms

    @property
    def resident_bytes(self) -> int:
        """Its memory."""
        assert self._process.pid is not None
        return proc.status_bytes(proc.status(self._process.pid), "VmRSS")

    def close(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.join()


def _serve(pipe: Pipe, secret: bytes, folder: Path | None, endpoint: str, rank: int, servers: int) -> None:
    from phalanx.ps.server.main import run

    host, port = endpoint.split(":")
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((host, int(port)))
    endpoint = f"{host}:{bound.getsockname()[1]}"
    os.environ["PHALANX_ENDPOINT_FD"] = str(bound.detach())
    pipe.send(endpoint)
    role = Role(kind="server", rank=rank, world_size=servers, endpoint=endpoint, job_id="bench")
    run(role, secret=secret, directory=folder)
