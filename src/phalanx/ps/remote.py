"""Tables on servers: one connection per server, and per call one request to each for all tables.

Requests are answered in their order, so a push is sent without waiting; its answer has come when that of the next pull
has, and is looked at then. A push whose keys are those of an earlier pull names the pull instead.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from phalanx.errors import ConfigError, did_you_mean
from phalanx.ps.deal import Array, Deal
from phalanx.ps.placement import table_salt
from phalanx.ps.rules import TableSpec
from phalanx.ps.snapshot.read import read
from phalanx.ps.snapshot.save import save
from phalanx.ps.store import Change, Keys, Pulled, Rows, TableReport, Want
from phalanx.ps.wire.connection import Connection, Pending
from phalanx.ps.wire.message import Reply

ServerMode = Literal["sync", "async", "bounded"]

KEPT_PULLS = 8
"""Pulls that a push can name; a server remembers more."""

_COLUMNS = ("counts", "shows", "clicks")


class RemoteStore:
    """A `Store` over servers.

    Args:
        endpoints: `host:port` of every server, by rank.
        secret: The job's secret.
        worker: Rank of this worker.
        workers: Number of workers of the job.
        mode: What the servers wait for.
        bound: Steps a worker may be ahead of the slowest, in mode `bounded`.
        timeout_s: Seconds for one answer, and for a server to come up.
        retry_s: Seconds to go on trying to reach a server that went away; 0 makes that an error at once.

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
        mode: ServerMode = "async",
        bound: int = 0,
        timeout_s: float = 300.0,
        retry_s: float = 0.0,
    ) -> None:
        self._about = {"mode": mode, "bound": bound, "workers": workers, "worker": worker}
        self._tables: dict[str, _Table] = {}
        self._first_step: int | None = None
        self._unanswered: list[_Push] = []
        self._kept: deque[_Named] = deque(maxlen=KEPT_PULLS)
        self._connections: list[Connection] = []
        client = secrets.randbits(64)
        try:
            for rank, endpoint in enumerate(endpoints):
                connection = Connection(
                    endpoint,
                    secret=secret,
                    me=f"worker {worker}",
                    peer=f"server {rank}",
                    client=client,
                    timeout_s=timeout_s,
                    retry_s=retry_s,
                )
                self._connections.append(connection)
        except BaseException:
            self.close()
            raise

    def declare(self, specs: Sequence[TableSpec]) -> None:
        """Make tables on every server. See `Store.declare`."""
        replies = self._call_all("declare", {**self._about, "specs": [spec.to_json() for spec in specs]})
        if self._first_step is None:
            self._first_step = self._go_on_from([int(reply.meta["step"]) for reply in replies])
        for spec in specs:
            self._tables[spec.name] = _Table(spec)

    def pull(self, wants: Sequence[Want], *, step: int = 0) -> Pulled:
        """Send one request to every server that owns any of the keys. See `Store.pull`."""
        pull = _Pull(self, wants, [self._deal(want.table, want.keys) for want in wants])
        pull.send(self._connections, self._number(step))
        if pull.named is not None:
            self._kept.append(pull.named)
        return pull

    def push(self, changes: Sequence[Change], *, step: int = 0, weight: float = 1.0) -> None:
        """Send one request to every server, also an empty one: it ends this worker's step there. See `Store.push`."""
        self.flush()
        named = next((pull for pull in reversed(self._kept) if pull.has_keys_of(changes)), _Named({}))
        about = {"step": self._number(step), "weight": weight, "changes": [_header(change) for change in changes]}
        parts = [_dealt(change, self._deal(change.table, change.keys)) for change in changes]
        for rank, connection in enumerate(self._connections):
            push = _Push(connection, about, [of_change[rank] for of_change in parts])
            push.send(named.ids.get(rank))
            self._unanswered.append(push)

    def flush(self) -> None:
        """Wait until the pushes on their way are acknowledged. See `Store.flush`.

        A push that a server refused, because its disk is full for one, is sent again by the next call.
        """
        while self._unanswered:
            self._unanswered[0].wait()
            del self._unanswered[0]

    def leave(self) -> None:
        """Say that this worker pushes no more. See `Store.leave`."""
        self.flush()
        self._call_all("leave", {})

    def report(self) -> dict[str, TableReport]:
        """Return counts by table name, summed over servers. See `Store.report`."""
        self.flush()
        of_servers = [reply.meta["tables"] for reply in self._call_all("report", {})]
        fields = TableReport.__slots__
        return {
            name: TableReport(*(sum(int(tables[name][field]) for tables in of_servers) for field in fields))
            for name in of_servers[0]
        }

    def shrink(self, table: str) -> int:
        """End a day on every server. See `Store.shrink`."""
        self.flush()
        return sum(int(reply.meta["rows"]) for reply in self._call_all("shrink", {"table": table}))

    def lease(self, epoch: int, files: Sequence[str]) -> tuple[str | None, int, int]:
        """Return this worker's next file of an epoch. See `Store.lease`."""
        meta = self._connections[0].call("lease", {"epoch": epoch, "files": list(files)}).meta
        return meta["file"], int(meta["offset"]), int(meta["left"])

    def done(self, epoch: int, file: str, offset: int, *, end: bool = True) -> None:
        """Report progress on a leased file. See `Store.done`."""
        self.flush()
        self._connections[0].call("done", {"epoch": epoch, "file": file, "offset": offset, "end": end})

    def save(self, directory: Path, extra: Mapping[str, object], *, mode: str = "full") -> None:
        """Write a snapshot of all servers at one moment. See `Store.save`."""
        self.flush()
        save(self._connections, directory, extra, mode)

    def load(self, directory: Path, names: Sequence[str] | None = None) -> dict[str, object]:
        """Let every server read its part of a snapshot. See `Store.load`."""
        self.flush()
        about = {"directory": str(directory.absolute()), "names": None if names is None else list(names)}
        self._call_all("load", about)
        return read(directory).extra()

    def close(self) -> None:
        """Close the connections. See `Store.close`."""
        for connection in self._connections:
            connection.close()

    def table(self, name: str) -> _Table:
        """Return what is known of a declared table."""
        try:
            return self._tables[name]
        except KeyError:
            raise ConfigError(
                f"there is no table {name!r}; tables: {sorted(self._tables)}.{did_you_mean(name, self._tables)}"
            ) from None

    def _number(self, step: int) -> int:
        """Return what the servers call this push of ours."""
        return step + (self._first_step or 0)

    def _deal(self, name: str, keys: Keys) -> Deal:
        table = self.table(name)
        if table.last is None or table.last[0] is not keys:
            table.last = keys, Deal.of(keys, table.salt, len(self._connections))
        return table.last[1]

    def _call_all(self, op: str, meta: Mapping[str, Any]) -> list[Reply]:
        pending = [connection.send(op, meta) for connection in self._connections]
        return [p.result() for p in pending]

    def _go_on_from(self, steps: list[int]) -> int:
        """Return the first push of this process: an earlier one of this worker may have died between two servers."""
        for connection, had in zip(self._connections, steps, strict=True):
            for step in range(had, max(steps)):
                connection.call("push", {"step": step, "weight": 0.0, "pull_id": None, "changes": []})
        return max(steps)


class _Table:
    """What a store knows of one table."""

    def __init__(self, spec: TableSpec) -> None:
        self.dim, self.salt = spec.dim, table_salt(spec.name)
        self.last: tuple[Keys, Deal] | None = None
        """The keys dealt last: those of a step's push are mostly those of its pull."""


@dataclass(frozen=True, slots=True)
class _Named:
    """What a push needs to name an earlier pull."""

    keys: dict[str, Keys]
    """By table."""

    ids: dict[int, int] = field(default_factory=dict)
    """What each server calls the pull, by the server's rank; known once the rows are."""

    def has_keys_of(self, changes: Sequence[Change]) -> bool:
        """Return whether a push of these changes can name this pull."""
        return bool(self.ids) and all(
            change.table in self.keys and _equal(self.keys[change.table], change.keys) for change in changes
        )


class _Pull:
    """A pull under way on several servers."""

    def __init__(self, store: RemoteStore, wants: Sequence[Want], deals: list[Deal]) -> None:
        self._store, self._wants, self._deals = store, wants, deals
        self._asked: dict[int, tuple[Connection, dict[str, Any], list[Array], Pending]] = {}
        self._rows: list[Rows] | None = None
        keys = {want.table: want.keys for want in wants}
        self.named = _Named(keys) if len(keys) == len(wants) else None

    def send(self, connections: Sequence[Connection], step: int) -> None:
        """Ask every server that owns some of the keys."""
        for rank, connection in enumerate(connections):
            keys = [deal.keys[rank] for deal in self._deals]
            if any(map(len, keys)):
                tables = [[want.table, len(k)] for want, k in zip(self._wants, keys, strict=True)]
                meta = {"step": step, "tables": tables, "keep": self.named is not None}
                pending = connection.send("pull", meta, keys, reply_bytes=self._room(tables))
                self._asked[rank] = connection, meta, keys, pending

    def rows(self) -> list[Rows]:
        """Wait and return one (n, dim) array per `Want`."""
        if self._rows is None:
            # The answers to earlier pushes have come before these; an error of theirs comes first.
            self._store.flush()
            answers = {rank: self._answer(rank) for rank in self._asked}
            self._rows = [
                deal.joined({rank: arrays[i] for rank, arrays in answers.items()}, self._store.table(want.table).dim)
                for i, (want, deal) in enumerate(zip(self._wants, self._deals, strict=True))
            ]
            self._asked.clear()
        return self._rows

    def _answer(self, rank: int) -> Sequence[Array]:
        connection, meta, keys, pending = self._asked[rank]
        reply = pending.result()
        if "need_push" in reply.meta:
            # A push before this pull had to be sent again, and came behind it.
            reply = connection.call("pull", meta, keys, reply_bytes=self._room(meta["tables"]))
        if self.named is not None:
            self.named.ids[rank] = int(reply.meta["pull_id"])
        return reply.arrays

    def _room(self, tables: Sequence[Sequence[Any]]) -> int:
        return sum(4 * self._store.table(name).dim * n + 64 for name, n in tables)


class _Push:
    """A push under way on one server.

    Args:
        connection: To the server.
        about: What goes with it.
        parts: Per change its keys, values and columns, as far as this server owns them.
    """

    def __init__(self, connection: Connection, about: Mapping[str, Any], parts: list[list[Array]]) -> None:
        self._connection, self._about, self._parts = connection, about, parts
        self._pending: Pending | None = None

    def send(self, pull_id: int | None) -> None:
        """Send the push, without keys if it names a pull."""
        start = 0 if pull_id is None else 1
        arrays = [array for part in self._parts for array in part[start:]]
        self._pending = self._connection.send("push", {**self._about, "pull_id": pull_id}, arrays)

    def wait(self) -> None:
        """Wait until it is acknowledged; sends it again if it was refused before, or its pull is forgotten."""
        if self._pending is None:
            self.send(None)
        assert self._pending is not None
        pending, self._pending = self._pending, None
        if pending.result().meta.get("need_keys"):
            self.wait()


def _header(change: Change) -> dict[str, Any]:
    columns = {column: True for column in _COLUMNS if getattr(change, column) is not None}
    return {"table": change.table, "kind": change.kind, "lr": change.lr, **columns}


def _dealt(change: Change, deal: Deal) -> list[list[Array]]:
    """Return the arrays of a change by server, the keys first."""
    columns = [getattr(change, column) for column in _COLUMNS]
    arrays = [deal.parts(array) for array in (change.values, *columns) if array is not None]
    return [list(of_server) for of_server in zip(deal.keys, *arrays, strict=True)]


def _equal(known: Keys, keys: Keys) -> bool:
    return known is keys or np.array_equal(known, keys)
