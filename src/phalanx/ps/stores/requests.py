"""`PullRequest` and `PushRequest`: send pulls and pushes to servers, wait for replies, retry."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.ps.stores.base import Keys, PullSpec, Rows
from phalanx.ps.stores.dedup import split_by_owner
from phalanx.ps.stores.update import TableUpdate
from phalanx.ps.wire.connection import Connection
from phalanx.ps.wire.message import Pending

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class KeyPartition:
    """Which of n ids go to which server."""

    keys: list[Keys]
    """Each server's ids."""

    order: NDArray[np.int64] | None
    """Positions of the ids, server by server, shape (n,); None when one server has them all."""

    offsets: list[int]
    """Where each server's positions begin, and the last one's end."""

    @classmethod
    def of(cls, keys: Keys, salt: int, servers: int) -> KeyPartition:
        """Return the partition of a table's ids over so many servers."""
        if servers == 1:
            return cls([keys], None, [0, len(keys)])
        order, offsets = split_by_owner(keys, salt, servers)
        ordered = keys.take(order)
        return cls([ordered[start:end] for start, end in pairwise(offsets)], order, offsets.tolist())

    def parts(self, array: Array) -> list[Array]:
        """Return each server's part of what belongs to the ids, shape (n, ...)."""
        if self.order is None:
            return [array]
        ordered = array.take(self.order, axis=0)
        return [ordered[start:end] for start, end in pairwise(self.offsets)]

    def merge(self, parts: Mapping[int, Rows], dim: int) -> Rows:
        """Return rows in the order of the ids, shape (n, dim), from each server's part by its rank."""
        if self.order is None and parts:
            return parts[0]
        rows = np.empty((self.offsets[-1], dim), np.float32)
        for rank, part in parts.items():
            assert self.order is not None
            rows[self.order[self.offsets[rank] : self.offsets[rank + 1]]] = part
        return rows


@dataclass(frozen=True, slots=True, eq=False)
class NamedPull:
    """What a push needs to name an earlier pull."""

    keys: dict[str, Keys]
    """By table."""

    ids: dict[int, int] = field(default_factory=dict)
    """What each server calls the pull, by the server's rank; known once the rows are."""

    def has_keys_of(self, update: TableUpdate) -> bool:
        """Return whether a change can name this pull."""
        keys = self.keys.get(update.table)
        return bool(self.ids) and keys is not None and (keys is update.keys or np.array_equal(keys, update.keys))


@dataclass(frozen=True, slots=True)
class ServerPull:
    """What is asked of one server."""

    tables: list[tuple[str, int]]
    """Name of each table, and how many of its keys."""

    keys: list[Keys]
    """By table."""

    reply_bytes: int
    """Bytes of the rows, each array beginning at a multiple of 64."""


@dataclass(frozen=True, slots=True)
class PartitionedPull:
    """Rows that are asked of several servers."""

    pull_specs: Sequence[PullSpec]
    """What is asked."""

    partitions: Sequence[KeyPartition]
    """Which server owns which keys, per table."""

    dims: Sequence[int]
    """Values per row, per table."""

    def of(self, rank: int) -> ServerPull | None:
        """Return what is asked of a server; None where it has none of the keys."""
        keys = [partition.keys[rank] for partition in self.partitions]
        if not any(map(len, keys)):
            return None
        tables = [(pull_spec.table, len(k)) for pull_spec, k in zip(self.pull_specs, keys, strict=True)]
        return ServerPull(tables, keys, sum(4 * dim * len(k) + 64 for k, dim in zip(keys, self.dims, strict=True)))

    def merge(self, answers: Mapping[int, Sequence[Array]]) -> list[Rows]:
        """Return one (n, dim) array per table, from what each server answered by its rank."""
        return [
            partition.merge({rank: arrays[i] for rank, arrays in answers.items()}, dim)
            for i, (partition, dim) in enumerate(zip(self.partitions, self.dims, strict=True))
        ]


class PullRequest:
    """A pull under way on several servers.

    Args:
        shares: What is asked of each.
        before: Called before the rows are read; the answers to earlier pushes have come when those to this pull have,
            and an error among them comes first.
    """

    def __init__(self, shares: PartitionedPull, before: Callable[[], None]) -> None:
        self._shares, self._before = shares, before
        self._sent: dict[int, tuple[Connection, dict[str, Any], ServerPull, Pending]] = {}
        self._rows: list[Rows] | None = None
        self.named = NamedPull({pull_spec.table: pull_spec.keys for pull_spec in shares.pull_specs})

    def send(self, connections: Sequence[Connection], step: int) -> None:
        """Ask every server that owns some of the keys."""
        for rank, connection in enumerate(connections):
            if share := self._shares.of(rank):
                meta = {"step": step, "tables": share.tables, "keep": True}
                pending = connection.send("pull", meta, share.keys, reply_bytes=share.reply_bytes)
                self._sent[rank] = connection, meta, share, pending

    def rows(self) -> list[Rows]:
        """Wait and return one (n, dim) array per `PullSpec`."""
        if self._rows is None:
            self._before()
            self._rows = self._shares.merge({rank: self._answer(rank) for rank in self._sent})
            self._sent.clear()
        return self._rows

    def _answer(self, rank: int) -> Sequence[Array]:
        connection, meta, share, pending = self._sent[rank]
        reply = pending.result()
        if "need_push" in reply.meta:
            # A push before this pull had to be sent again, and came behind it.
            reply = connection.call("pull", meta, share.keys, reply_bytes=share.reply_bytes)
        self.named.ids[rank] = int(reply.meta["pull_id"])
        return reply.arrays


class PushRequest:
    """A push under way on one server.

    Args:
        connection: To the server.
        about: What goes with it.
        headers: The JSON object of each update.
        parts: Per change its keys, values and columns, as far as this server owns them.
        then: Rows to read once the push is in place.
    """

    def __init__(
        self,
        connection: Connection,
        about: Mapping[str, Any],
        headers: Sequence[Mapping[str, Any]],
        parts: Sequence[list[Array]],
        then: ServerPull | None,
    ) -> None:
        self._connection, self._about, self._headers, self._parts = connection, about, headers, parts
        self._then = then
        self._pending: Pending | None = None
        self.arrays: Sequence[Array] | None = None
        """The rows of `then`, once they came."""

    def send(self, pulls: Sequence[int | None]) -> None:
        """Send the push; a change that names the pull its keys came with goes without them."""
        updates = [{**header, "pull": pull} for header, pull in zip(self._headers, pulls, strict=True)]
        parts = zip(self._parts, pulls, strict=True)
        arrays = [array for part, pull in parts for array in part[0 if pull is None else 1 :]]
        meta, then = {**self._about, "changes": updates}, self._then
        if then is None:
            self._pending = self._connection.send("push", meta, arrays)
        else:
            meta["then"] = then.tables
            self._pending = self._connection.send("push", meta, arrays + then.keys, reply_bytes=then.reply_bytes)

    def wait(self) -> None:
        """Wait until it is acknowledged; sends it again if it was refused before, or its pull is forgotten."""
        if self._pending is None:
            self.send([None] * len(self._parts))
        assert self._pending is not None
        pending, self._pending = self._pending, None
        reply = pending.result()
        if reply.meta.get("need_keys"):
            self.wait()
        elif self._then is not None:
            self.arrays = reply.arrays


class PulledAfter:
    """Rows that come with the answers to a push.

    Args:
        pushes: The push, by the servers' ranks.
        shares: What was asked with it.
        flush: Waits for the answers.
    """

    def __init__(self, pushes: Sequence[PushRequest], shares: PartitionedPull, flush: Callable[[], None]) -> None:
        self._pushes, self._shares, self._flush = pushes, shares, flush

    def rows(self) -> list[Rows]:
        """Wait and return one (n, dim) array per `PullSpec`."""
        self._flush()
        answers = {rank: push.arrays for rank, push in enumerate(self._pushes) if push.arrays is not None}
        return self._shares.merge(answers)


def split_update(update: TableUpdate, partition: KeyPartition) -> list[list[Array]]:
    """Return the arrays of an update by server, the keys first."""
    arrays = [partition.parts(array) for array in update.arrays()[1:]]
    return [list(of_server) for of_server in zip(partition.keys, *arrays, strict=True)]
