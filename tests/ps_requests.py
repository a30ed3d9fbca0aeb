"""Requests to a parameter server's service as a worker makes them, without sockets; what several test files share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from phalanx._core import MemoryBudget, ServerContext
from phalanx.ps.server.service import Service
from phalanx.ps.snapshot.save import LocalAnswer
from phalanx.ps.stores.base import Keys, Rows
from phalanx.ps.stores.partition import PartitionedRequest, ServerPart, partition_keys, partitioned_request
from phalanx.ps.stores.update import TableUpdate
from phalanx.ps.table.placement import table_salt
from phalanx.ps.table.rules import Constant, TableSpec
from phalanx.ps.table.update_rules import SGD
from phalanx.ps.wire import frame
from phalanx.ps.wire.data_frame import DataReply, DataRequest, DataStatus
from phalanx.ps.wire.frame import FrameKind
from phalanx.ps.wire.message import RpcReply, RpcRequest, _raised

SPEC = TableSpec(name="items", dim=2, rule=SGD(lr=1.0), init=Constant(0.0))


class Answer(NamedTuple):
    """The answer to a pull or push, its rows an array per pull."""

    status: DataStatus
    number: int
    dropped: int
    rows: list[Rows]


APPLIED = Answer(DataStatus.DONE, 0, 0, [])
"""The answer to a push of which nothing was dropped."""

NEED_KEYS = Answer(DataStatus.NEED_KEYS, 0, 0, [])
"""The answer to a push that names a pull which the server forgot, or comes behind one that does."""


def keys(*ids: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(ids, np.int64)


def gradient(ids: tuple[int, ...], value: float, *, table: str = "items", **fields: Any) -> TableUpdate:
    return TableUpdate(table, keys(*ids), np.full((len(ids), 2), value, np.float32), **fields)


def answer_data(
    service: Service,
    request: DataRequest,
    *,
    client: int,
    seq: int,
    peer: str = "worker 0",
    report_wait: Callable[[str, bool], None] = lambda waits_for, is_connected: None,
) -> DataReply:
    """Let a service's engine answer the frame of a pull or push."""
    context = ServerContext(service.engine, "server 0", 1 << 30, MemoryBudget(1 << 30), print)
    payload = np.empty(request.payload_bytes, np.uint8)
    request.write(payload)
    kind, raw, rows = context.answer(peer, client, request.kind, seq, request.encode(None), payload, report_wait)
    if kind == FrameKind.ERROR:
        raise _raised(frame.parse_object(raw), "server 0")
    return request.decode_reply(FrameKind(kind), raw, len(rows), lambda at, count: rows)


class FakeWorker:
    """Asks a service as worker `worker`, numbering its requests."""

    def __init__(self, service: Service, worker: int = 0, *, client: int | None = None) -> None:
        self.service, self.worker = service, worker
        self.client = 100 + worker if client is None else client
        self.seq = 0
        self._dims: dict[str, int] = {}

    def call(self, op: str, meta: dict[str, Any], arrays: Any = (), *, seq: int | None = None) -> RpcReply:
        number = self._next(seq)
        return self.service.handle(
            RpcRequest(op, meta, list(arrays), client=self.client, seq=number, peer=f"worker {self.worker}")
        )

    def ask(self, request: DataRequest, *, seq: int | None = None) -> DataReply:
        number = self._next(seq)
        return answer_data(self.service, request, client=self.client, seq=number, peer=f"worker {self.worker}")

    def send(self, op: str, meta: Mapping[str, Any]) -> LocalAnswer:
        """Ask as `save` does; the answer is there at once."""
        return LocalAnswer(self.call(op, dict(meta)))

    def declare(self, *specs: TableSpec, mode: str = "async", bound: int = 0, workers: int = 1) -> dict[str, Any]:
        meta = {"mode": mode, "bound": bound, "workers": workers, "worker": self.worker}
        self._dims |= {spec.name: spec.dim for spec in specs}
        return dict(self.call("declare", {"specs": [s.to_json() for s in specs or (SPEC,)], **meta}).meta)

    def pull(self, *ids: int, step: int = 0, table: str = "items", keep: bool = False) -> Answer:
        return self.pull_all([(table, keys(*ids))], step=step, keep=keep)

    def pull_all(self, tables: Sequence[tuple[str, Keys]], *, step: int = 0, keep: bool = False) -> Answer:
        request = partitioned_request(1)
        self._add_pulls(request, tables)
        return self._answered(request, self.ask(DataRequest(FrameKind.PULL, ServerPart(request, 0), step, keep=keep)))

    def push(
        self,
        *updates: TableUpdate,
        step: int = 0,
        weight: float = 1.0,
        pull: int = 0,
        then: Sequence[tuple[str, Keys]] = (),
        seq: int | None = None,
    ) -> Answer:
        """Push updates, whose keys are those of the pull of this number, if that is not 0."""
        request = partitioned_request(1)
        for update in updates:
            partition = partition_keys(update.keys, table_salt(update.table), 1)
            request.add_push(update, partition, np.array([pull], np.uint64))
        self._add_pulls(request, then)
        return self._answered(
            request, self.ask(DataRequest(FrameKind.PUSH, ServerPart(request, 0), step, weight), seq=seq)
        )

    def push_pulled(self, pull: int, value: float, n: int, *, step: int = 0, seq: int | None = None) -> Answer:
        return self.push(gradient((0,) * n, value), step=step, pull=pull, seq=seq)

    def _next(self, seq: int | None) -> int:
        self.seq += 1
        return self.seq if seq is None else seq

    def _add_pulls(self, request: PartitionedRequest, tables: Sequence[tuple[str, Keys]]) -> None:
        for table, ids in tables:
            request.add_pull(partition_keys(ids, table_salt(table), 1), self._dims.get(table, SPEC.dim))

    def _answered(self, request: PartitionedRequest, reply: DataReply) -> Answer:
        has_rows = reply.status <= DataStatus.AGAIN and request.counts(0)[1] > 0
        return Answer(reply.status, reply.number, reply.dropped, request.merge({0: reply.rows}) if has_rows else [])


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
