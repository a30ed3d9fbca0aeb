"""Requests to a parameter server's service as a worker makes them, without sockets; what several test files share."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.ps.server.service import Service
from phalanx.ps.snapshot.save import LocalAnswer
from phalanx.ps.stores.update import TableUpdate, pack_updates
from phalanx.ps.table.rules import Constant, TableSpec
from phalanx.ps.table.update_rules import SGD
from phalanx.ps.wire.message import RpcReply, RpcRequest

SPEC = TableSpec(name="items", dim=2, rule=SGD(lr=1.0), init=Constant(0.0))


def keys(*ids: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(ids, np.int64)


def gradient(ids: tuple[int, ...], value: float, *, table: str = "items", **fields: Any) -> TableUpdate:
    return TableUpdate(table, keys(*ids), np.full((len(ids), 2), value, np.float32), **fields)


class FakeWorker:
    """Calls a service as worker `worker`, numbering its requests."""

    def __init__(self, service: Service, worker: int = 0, *, client: int | None = None) -> None:
        self.service, self.worker = service, worker
        self.client = 100 + worker if client is None else client
        self.seq = 0

    def call(self, op: str, meta: dict[str, Any], arrays: Any = (), *, seq: int | None = None) -> RpcReply:
        self.seq += 1
        number = self.seq if seq is None else seq
        return self.service.handle(
            RpcRequest(op, meta, list(arrays), client=self.client, seq=number, peer=f"worker {self.worker}")
        )

    def send(self, op: str, meta: Mapping[str, Any]) -> LocalAnswer:
        """Ask as `save` does; the answer is there at once."""
        return LocalAnswer(self.call(op, dict(meta)))

    def declare(self, *specs: TableSpec, mode: str = "async", bound: int = 0, workers: int = 1) -> dict[str, Any]:
        meta = {"mode": mode, "bound": bound, "workers": workers, "worker": self.worker}
        return dict(self.call("declare", {"specs": [s.to_json() for s in specs or (SPEC,)], **meta}).meta)

    def pull(self, *ids: int, step: int = 0, table: str = "items", keep: bool = False) -> RpcReply:
        return self.call("pull", {"step": step, "tables": [[table, len(ids)]], "keep": keep}, [keys(*ids)])

    def push(self, *changes: TableUpdate, step: int = 0, weight: float = 1.0, seq: int | None = None) -> dict[str, Any]:
        described, arrays = pack_updates(changes)
        meta = {"step": step, "weight": weight, "changes": described}
        return dict(self.call("push", meta, arrays, seq=seq).meta)

    def push_pulled(self, pull_id: int, value: float, n: int, *, step: int = 0, seq: int | None = None) -> Any:
        change = {"table": "items", "kind": "gradient", "lr": None, "pull": pull_id}
        meta = {"step": step, "weight": 1.0, "changes": [change]}
        return self.call("push", meta, [np.full((n, 2), value, np.float32)], seq=seq).meta


@contextmanager
def disk_that_cannot_sync(directory: Path) -> Iterator[None]:
    """Put a pipe in place of the log of a folder that this process writes: it takes records, and no fsync."""
    opened = [int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
    (log,) = (fd for fd in opened if os.readlink(f"/proc/self/fd/{fd}").startswith(f"{directory}/log-"))
    kept, (reading, writing) = os.dup(log), os.pipe()
    os.dup2(writing, log)
    try:
        yield
    finally:
        os.dup2(kept, log)
        for fd in (kept, reading, writing):
            os.close(fd)
