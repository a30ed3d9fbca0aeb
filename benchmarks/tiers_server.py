"""`TierServer`, `TierWorker`: a parameter server, in a memory control group if it is to have a limit; its workers."""

from __future__ import annotations

import json
import multiprocessing
import os
import secrets
import socket
import time
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

from phalanx.cluster import proc
from phalanx.cluster.role.role import Role
from phalanx.ps.server.status import STATUS_S
from phalanx.ps.stores.base import Keys, PullSpec, Rows
from phalanx.ps.stores.remote import RemoteStore
from phalanx.ps.stores.update import TableUpdate
from phalanx.ps.table.rules import TableSpec

SECRET = secrets.token_bytes(32)
_LIMIT_FILES = ("memory.limit_in_bytes", "memory.max")
_MOST_FILES = ("memory.max_usage_in_bytes", "memory.peak")


class TierWorker:
    """Pulls and pushes in mode async.

    Args:
        endpoint: Of the only server.
        worker: Its number.
        workers: How many there are.
    """

    def __init__(self, endpoint: str, worker: int, workers: int) -> None:
        self.store = RemoteStore(
            [endpoint], secret=SECRET, worker=worker, workers=workers, mode="async", timeout_s=600.0
        )
        self._step = 0

    def declare(self, spec: TableSpec) -> None:
        """Make a table."""
        self.store.declare([spec])

    def flush(self) -> None:
        """Wait until everything that was pushed is there."""
        self.store.flush()

    def pull(self, table: str, keys: Keys) -> Rows:
        """Return rows."""
        (rows,) = self.store.pull([PullSpec(table, keys)], step=self._step).rows()
        return rows

    def push(self, table: str, keys: Keys, gradients: Rows) -> None:
        """Push gradients, whose acknowledgement comes with the next pull."""
        self.store.push([TableUpdate(table, keys, gradients)], step=self._step)
        self._step += 1


class TierServer:
    """Serves tables until it is closed.

    Args:
        folder: For its state and for rows in files.
        name: Of the folder's files of this server.
        memory_bytes: Limit of its control group; None for none.
        workers: How many it has.
    """

    def __init__(self, folder: Path, name: str, memory_bytes: int | None, workers: int) -> None:
        self._status, self._name = folder / f"{name}.json", name
        self._group = make_group(f"phalanx-{name}-{os.getpid()}", memory_bytes) if memory_bytes else None
        context = multiprocessing.get_context("spawn")
        near, far = context.Pipe()
        arguments = (far, SECRET, folder, self._status, self._group)
        self._process = context.Process(target=_serve, args=arguments, name=name)
        self._process.start()
        far.close()  # so that the end of a server that fails is the end of the pipe
        endpoint = near.recv()
        self.workers = [TierWorker(endpoint, worker, workers) for worker in range(workers)]

    @property
    def is_limited(self) -> bool:
        """Whether a control group limits its memory."""
        return self._group is not None

    @property
    def cpu_seconds(self) -> float:
        """Processor time it has used, that of the system for it too."""
        assert self._process.pid is not None
        return proc.cpu_seconds(self._process.pid)

    @property
    def memory_bytes(self) -> tuple[int, int]:
        """What it has in memory, and the most that its group counted, cached pages of its files too; 0 without one."""
        assert self._process.pid is not None
        resident = proc.status_bytes(proc.status(self._process.pid), "VmRSS")
        most = [self._group / name for name in _MOST_FILES if self._group and (self._group / name).exists()]
        return resident, int(most[0].read_text()) if most else 0

    def counts(self, table: str) -> dict[str, int]:
        """Return the counts of a table as they are now; waits for the server's next report."""
        asked = time.time()
        while True:
            time.sleep(STATUS_S / 20)
            if not self._process.is_alive():
                raise RuntimeError(f"the server {self._name} ended with {self._process.exitcode}")
            status = json.loads(self._status.read_text()) if self._status.exists() else {"time": 0}
            if status["time"] > asked:
                counts: dict[str, int] = status["tables"][table]
                return counts

    def close(self) -> None:
        """End it."""
        for worker in self.workers:
            worker.store.close()
        self._process.kill()
        self._process.join()
        if self._group:
            self._group.rmdir()


def make_group(name: str, memory_bytes: int) -> Path | None:
    """Make a memory control group below that of this process; returns its folder, None where that may not be."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("memory", ""):
            continue
        group = Path("/sys/fs/cgroup", controllers, path.strip("/"), name)
        try:
            group.mkdir()
        except OSError:
            continue
        for limit in (group / file for file in _LIMIT_FILES):
            if limit.exists():
                limit.write_text(str(memory_bytes))
                return group
        group.rmdir()
    return None


def _serve(pipe: Pipe, secret: bytes, folder: Path, status: Path, group: Path | None) -> None:
    if group is not None:
        (group / "cgroup.procs").write_text(str(os.getpid()))
    from phalanx.ps.server.main import run

    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.bind(("127.0.0.1", 0))
    endpoint = f"127.0.0.1:{bound.getsockname()[1]}"
    pipe.send(endpoint)
    os.environ.update(
        PHALANX_ENDPOINT_FD=str(bound.detach()),
        PHALANX_SERVER_MAX_BYTES=str(1 << 40),
        PHALANX_SPILL_DIR=str(folder),
        PHALANX_STATUS_FILE=str(status),
    )
    run(Role(kind="server", endpoint=endpoint, job_id="bench"), secret=secret)
