"""`RemoteStore`: tables on parameter servers, one connection per server.

Requests are answered in their order, so a push is sent without waiting; its answer has come when that of the next pull
has, and is looked at then. A push whose keys are those of an earlier pull names the pull instead.

The number of servers may change: what they had not answered is cut anew and asked of those that the job has then. A
push is in the tables of all former servers or of none, and its number tells the new ones which.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from phalanx.ps.snapshot.read import open_snapshot
from phalanx.ps.snapshot.save import save
from phalanx.ps.stores.base import Keys, PendingRows, PullSpec, ServerMode, TableReport
from phalanx.ps.stores.partition import (
    KeyPartition,
    PartitionedRequest,
    PullNumbers,
    ServerPart,
    partition_keys,
    partitioned_request,
)
from phalanx.ps.stores.requests import MovablePull, NamedPull, PulledAfter, PullRequest, PushRequest, SentPush
from phalanx.ps.stores.tables import get_table
from phalanx.ps.stores.update import TableUpdate, check_keys, check_tables_once
from phalanx.ps.table.placement import table_salt
from phalanx.ps.table.rules import TableSpec
from phalanx.ps.wire.client.connection import Connection, ServersMovedError
from phalanx.ps.wire.client.server_connections import ServerConnections
from phalanx.ps.wire.client.server_layout import LayoutFile
from phalanx.ps.wire.data_frame import ValueType
from phalanx.ps.wire.message import Pending, RpcReply

_log = logging.getLogger("phalanx.ps")
_Answer = TypeVar("_Answer")
_CONTINUES = (
    "worker %d continues where an earlier process of it ended: the servers have %d updates of that. Its data starts "
    "where the script starts it: samples of those updates are trained again, unless the servers lease them "
    "(LeasedFiles, or a ShardedLoader where workers come and go) or it loads the state_dict of its loader"
)

NAMED_PULLS = 8
"""Pulls that a push can name; a server remembers more."""


class RemoteStore:
    """A `TableStore` over servers.

    Args:
        endpoints: `host:port` of every server, by rank.
        secret: The job's secret.
        worker: Rank of this worker.
        workers: Number of workers of the job.
        mode: What the servers wait for; None for a worker that trains nothing, and goes along with any.
        bound: Steps a worker may be ahead of the slowest, in mode `bounded`.
        timeout_s: Longest silence of a server that an answer is due from. One that waits for a worker that lives is
            not silent.
        connect_s: Seconds for a server to come up.
        retry_s: Seconds to continue trying to reach a server that went away; 0 makes that an error at once.
        wire_dtype: As what rows of ids and their gradients travel; all else of tables is float32.
        layout_file: Where the launcher says that the job has other servers now; None where it never has.

    Raises:
        PeerLostError: If a server does not come; names it.
        ConfigError: If something else answers, or the secret is another.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        secret: bytes,
        worker: int,
        workers: int,
        mode: ServerMode | None = "async",
        bound: int = 0,
        timeout_s: float = 300.0,
        connect_s: float = 60.0,
        retry_s: float = 0.0,
        wire_dtype: ValueType = "float32",
        layout_file: Path | None = None,
    ) -> None:
        self._about = {"mode": mode, "bound": bound, "workers": workers, "worker": worker}
        self._tables: dict[str, _Table] = {}
        self._wire_dtype = wire_dtype
        self._first_step: int | None = None
        self._push: SentPush | None = None
        """The newest, until it is acknowledged."""

        self._begun: tuple[Pending, Mapping[str, Any]] | None = None
        self._named_pulls: deque[NamedPull] = deque(maxlen=NAMED_PULLS)
        client, lock = secrets.randbits(64), threading.RLock()

        def connect(endpoint: str, rank: int, has_moved: Callable[[], bool]) -> Connection:
            return Connection(
                endpoint,
                secret=secret,
                me=f"worker {worker}",
                peer=f"server {rank}",
                client=client,
                timeout_s=timeout_s,
                connect_s=connect_s,
                retry_s=retry_s,
                has_moved=has_moved,
                lock=lock,
            )

        self._connections = ServerConnections(LayoutFile(layout_file, tuple(endpoints)), connect)

    def declare(self, specs: Sequence[TableSpec]) -> None:
        """Make tables on every server. See `TableStore.declare`."""
        self._ask(lambda: self._declare(specs))

    def _declare(self, specs: Sequence[TableSpec]) -> None:
        replies = self._call_all("declare", {**self._about, "specs": [spec.to_json() for spec in specs]})
        if self._first_step is None:
            self._first_step = self._fill_steps([int(reply.meta["step"]) for reply in replies])
            if self._first_step:
                _log.warning(_CONTINUES, self._about["worker"], self._first_step)
        for spec in specs:
            # Dense parameters are read back after every step, so rounding would reach what a worker saves of them.
            self._tables[spec.name] = _Table(spec, is_narrow=self._wire_dtype == "bfloat16" and spec.dense is None)

    @property
    def first_push(self) -> int:
        """Pushes of earlier processes of this worker, after which its own are counted; known once it has declared."""
        return self._first_step or 0

    def pull(self, pull_specs: Sequence[PullSpec], *, step: int = 0) -> PendingRows:
        """Send one request to every server that owns any of the keys. See `TableStore.pull`."""
        return MovablePull(lambda: self._send_pull(pull_specs, self._number(step)), self._follow)

    def _send_pull(self, pull_specs: Sequence[PullSpec], step: int) -> PullRequest:
        request = partitioned_request(len(self._connections))
        self._add_pulls(request, pull_specs)
        keys = {pull_spec.table: pull_spec.keys for pull_spec in pull_specs}
        pull = PullRequest(request, keys, self.flush, keep=len(keys) == len(pull_specs))
        pull.send(self._connections, step)
        if pull_specs:
            self._named_pulls.append(pull.named)
        return pull

    def push(
        self, updates: Sequence[TableUpdate], *, step: int = 0, weight: float = 1.0, then: Sequence[PullSpec] = ()
    ) -> PendingRows:
        """Send one request, possibly empty, to every server; it ends this step there. See `TableStore.push`."""
        self.flush()
        check_tables_once(updates)
        for update in updates:
            update.check(get_table(self._tables, update.table).spec)
        push = SentPush(updates, self._number(step), weight, then)
        self._send_push(push)
        self._push = push
        return PulledAfter(push, self.flush)

    def _send_push(self, push: SentPush) -> None:
        request = partitioned_request(len(self._connections))
        self._add_pulls(request, push.then)
        for update in push.updates:
            is_narrow = update.kind == "gradient" and self._tables[update.table].is_narrow
            partition = self._partition(update.table, update.keys)
            request.add_push(update, partition, self._take_pull(update), is_narrow=is_narrow)
        push.send(request, self._connections)

    def flush(self) -> None:
        """Wait until the pushes on their way are acknowledged. See `TableStore.flush`.

        A push that a server refused, because its disk is full for one, is sent again by the next call.
        """
        if self._push is not None:
            self._ask(self._push.wait)
            self._push = None

    def leave(self) -> None:
        """Say that this worker pushes no more. See `TableStore.leave`."""
        self.flush()
        self._call_all("leave", {})

    def report(self) -> dict[str, TableReport]:
        """Return counts by table name, summed over servers. See `TableStore.report`."""
        self.flush()
        of_servers = [reply.meta["tables"] for reply in self._call_all("report", {})]
        fields = TableReport.__slots__
        return {
            name: TableReport(*(sum(int(tables[name][field]) for tables in of_servers) for field in fields))
            for name in of_servers[0]
        }

    def shrink(self, table: str) -> int:
        """End a day on every server. See `TableStore.shrink`."""
        self.flush()
        return sum(int(reply.meta["rows"]) for reply in self._call_all("shrink", {"table": table}))

    def lease(self, epoch: int, files: Sequence[str]) -> tuple[str | None, int, int]:
        """Return this worker's next file of an epoch. See `TableStore.lease`."""
        meta = self._call_first("lease", {"epoch": epoch, "files": list(files)})
        return meta["file"], int(meta["offset"]), int(meta["left"])

    def report_progress(self, epoch: int, file: str, offset: int, *, end: bool = True) -> None:
        """Report progress on a leased file. See `TableStore.report_progress`."""
        self.flush()
        self._call_first("done", {"epoch": epoch, "file": file, "offset": offset, "end": end})

    def lease_batches(
        self, loader: int, epoch: int, total: int, count: int, *, step: int | None
    ) -> tuple[list[tuple[int, int]], int]:
        """Return this worker's next batches of an epoch as (epoch, number), and how many are left of it after them.

        Args:
            loader: Which of the script's loaders.
            epoch: Which epoch.
            total: Batches of it.
            count: Most batches to return.
            step: Pushes made so far, where the batches are begun at once; see `begin_batch`.

        Raises:
            ConfigError: If another worker cut the epoch into another number of batches.
        """
        if self._first_step is None:
            self.declare([])
        push = None if step is None else self._number(step)
        about = {"loader": loader, "epoch": epoch, "total": total, "count": count, "push": push}
        meta = self._call_first("lease_batches", about)
        return [(int(e), int(number)) for e, number in meta["batches"]], int(meta["left"])

    def begin_batch(self, loader: int, epoch: int, number: int, *, step: int) -> None:
        """Say that a leased batch will be in the push of this number; returns once that is on its way."""
        if self._begun is not None:
            self._ask(self._wait_begun)
        about = {"loader": loader, "epoch": epoch, "number": number, "push": self._number(step)}
        self._begun = self._ask(lambda: self._connections[0].send("begin", about)), about

    def _wait_begun(self) -> None:
        assert self._begun is not None
        self._begun[0].result()

    def save(self, directory: Path, extra: Mapping[str, object], *, mode: str = "full") -> None:
        """Write a snapshot of all servers at one moment. See `TableStore.save`."""
        self.flush()
        self._ask(lambda: save(self._connections, directory, extra, mode))

    def load(self, directory: Path, names: Sequence[str] | None = None) -> dict[str, object]:
        """Let every server read its part of a snapshot. See `TableStore.load`."""
        self.flush()
        about = {"directory": str(directory.absolute()), "names": None if names is None else list(names)}
        self._call_all("load", about)
        return open_snapshot(directory).extra()

    def close(self) -> None:
        """Close the connections. See `TableStore.close`."""
        self._connections.close()

    def _take_pull(self, update: TableUpdate) -> PullNumbers | None:
        """Return what each server calls the pull that a change's keys came with; servers forget them with the push."""
        for pull in reversed(self._named_pulls):
            if pull.has_keys_of(update):
                del pull.keys[update.table]
                return pull.numbers
        return None

    def _number(self, step: int) -> int:
        """Return what the servers call this push of ours."""
        return step + (self._first_step or 0)

    def _add_pulls(self, request: PartitionedRequest, pull_specs: Sequence[PullSpec]) -> None:
        for pull_spec in pull_specs:
            table = get_table(self._tables, pull_spec.table)
            check_keys(table.spec, pull_spec.keys)
            partition = self._partition(pull_spec.table, pull_spec.keys)
            request.add_pull(partition, table.spec.dim, is_narrow=table.is_narrow)

    def _partition(self, name: str, keys: Keys) -> KeyPartition:
        table = get_table(self._tables, name)
        if table.last is None or table.last[0] is not keys:
            table.last = keys, partition_keys(keys, table.salt, len(self._connections))
        return table.last[1]

    def _call_first(self, op: str, meta: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._ask(lambda: self._connections[0].call(op, meta).meta)

    def _call_all(self, op: str, meta: Mapping[str, Any]) -> list[RpcReply]:
        def ask() -> list[RpcReply]:
            pending = [connection.send(op, meta) for connection in self._connections]
            return [p.result() for p in pending]

        return self._ask(ask)

    def _ask(self, ask: Callable[[], _Answer]) -> _Answer:
        """Return what `ask` returns; it asks again where the job has other servers meanwhile."""
        while True:
            try:
                return ask()
            except ServersMovedError:
                self._follow()

    def _follow(self) -> None:
        """Continue with the servers that the job has now, and send them first what the former have not answered."""
        while self._connections.follow():
            self._named_pulls.clear()
            for table in self._tables.values():
                table.last = None
            with suppress(ServersMovedError):
                if self._begun is not None:
                    self._begun = self._connections[0].send("begin", self._begun[1]), self._begun[1]
                if self._push is not None:
                    self._send_push(self._push)

    def _fill_steps(self, steps: list[int]) -> int:
        """Return the first push of this process: an earlier one of this worker may have died between two servers."""
        for connection, had in zip(self._connections, steps, strict=True):
            for step in range(had, max(steps)):
                push = PushRequest(connection, ServerPart(partitioned_request(len(steps)), 0), step, 0.0)
                push.send()
                push.wait()
        return max(steps)


class _Table:
    """What a store knows of one table."""

    def __init__(self, spec: TableSpec, *, is_narrow: bool) -> None:
        self.spec, self.salt = spec, table_salt(spec.name)
        self.is_narrow = is_narrow
        """Whether its rows and gradients travel as bfloat16."""

        self.last: tuple[Keys, KeyPartition] | None = None
        """The keys dealt last: those of a step's push are mostly those of its pull."""
