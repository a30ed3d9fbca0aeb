"""The NumPy twin of `csrc/partition.h`: the same bytes where the native core is not installed. See `partition`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from phalanx.ps.stores.base import Keys, Rows
from phalanx.ps.stores.dedup import Places, split_by_owner
from phalanx.ps.stores.partition import PullNumbers
from phalanx.ps.stores.update import COLUMNS, KINDS, TableUpdate
from phalanx.ps.table.initializers import bfloat16_bits, from_bfloat16_bits
from phalanx.ps.wire import data_frame
from phalanx.ps.wire.frame import Array, Bytes, aligned

_COLUMN_BITS = (data_frame.HAS_COUNTS, data_frame.HAS_SHOWS, data_frame.HAS_CLICKS)


@dataclass(frozen=True, slots=True)
class NumpyPartition:
    """Which of n ids of a table go to which server."""

    keys: Keys
    salt: int
    order: Places | None
    """Positions of the ids, server by server, shape (n,); None when one server has them all."""

    offsets: list[int]
    """Where each server's positions begin, and the last one's end."""

    @classmethod
    def of(cls, keys: Keys, salt: int, servers: int) -> NumpyPartition:
        """Return the partition of a table's ids over so many servers."""
        if servers == 1:
            return cls(keys, salt, None, [0, len(keys)])
        order, offsets = split_by_owner(keys, salt, servers)
        return cls(keys, salt, order, offsets.tolist())

    @property
    def size(self) -> int:
        """How many ids there are."""
        return len(self.keys)

    def count(self, server: int) -> int:
        """Return how many ids a server has."""
        return self.offsets[server + 1] - self.offsets[server]

    def take(self, array: Array, server: int) -> Array:
        """Return a server's part of what belongs to the ids, shape (n, ...)."""
        return array if self.order is None else array[self.positions(server)]

    def positions(self, server: int) -> Places:
        """Return the positions of a server's ids."""
        assert self.order is not None
        return self.order[self.offsets[server] : self.offsets[server + 1]]


@dataclass(frozen=True, slots=True)
class _Push:
    update: TableUpdate
    partition: NumpyPartition
    pulls: PullNumbers | None
    is_narrow: bool

    def arrays(self, server: int, *, with_keys: bool) -> list[Array]:
        keys, values, *columns = self.update.arrays()
        rest = [bfloat16_bits(values) if self.is_narrow else values, *columns]
        sent = rest if self.pull(server, with_keys=with_keys) else [keys, *rest]
        return [self.partition.take(array, server) for array in sent]

    def pull(self, server: int, *, with_keys: bool) -> int:
        return 0 if with_keys or self.pulls is None else int(self.pulls[server])

    def head(self, server: int, *, with_keys: bool) -> bytes:
        update = self.update
        columns = sum(bit for name, bit in zip(COLUMNS, _COLUMN_BITS, strict=True) if getattr(update, name) is not None)
        return data_frame.PUSH_HEAD.pack(
            self.partition.salt,
            self.pull(server, with_keys=with_keys),
            0.0 if update.lr is None else update.lr,
            self.partition.count(server),
            update.values.shape[1],
            KINDS.index(update.kind),
            columns
            | (0 if update.lr is None else data_frame.HAS_LR)
            | (data_frame.BFLOAT16_VALUES if self.is_narrow else 0),
        )


@dataclass(frozen=True, slots=True)
class _Pull:
    partition: NumpyPartition
    dim: int
    is_narrow: bool

    @property
    def dtype(self) -> type[np.generic]:
        return np.uint16 if self.is_narrow else np.float32

    def row_bytes(self, server: int) -> int:
        return self.dim * np.dtype(self.dtype).itemsize * self.partition.count(server)

    def head(self, server: int) -> bytes:
        flags = data_frame.BFLOAT16_ROWS if self.is_narrow else 0
        return data_frame.PULL_HEAD.pack(self.partition.salt, self.partition.count(server), flags)

    def read(self, payload: Bytes) -> Rows:
        rows = payload.view(self.dtype).reshape(-1, self.dim)
        return from_bfloat16_bits(rows) if self.is_narrow else rows


@dataclass(frozen=True, slots=True)
class NumpyRequest:
    """See `partition.PartitionedRequest`."""

    servers: int
    pushes: list[_Push] = field(default_factory=list)
    pulls: list[_Pull] = field(default_factory=list)

    def add_push(
        self, update: TableUpdate, partition: NumpyPartition, pulls: PullNumbers | None, *, is_narrow: bool = False
    ) -> None:
        """Add an update. See `PartitionedRequest.add_push`."""
        self.pushes.append(_Push(update, partition, pulls, is_narrow))

    def add_pull(self, partition: NumpyPartition, dim: int, *, is_narrow: bool = False) -> None:
        """Add rows to read. See `PartitionedRequest.add_pull`."""
        self.pulls.append(_Pull(partition, dim, is_narrow))

    def counts(self, server: int) -> tuple[int, int]:
        """Return how many tables a server's part pushes and reads."""
        return len(self.pushes), len(self._pulls_of(server))

    def read_servers(self) -> list[int]:
        """Return the servers that own some of the keys that are read."""
        return [server for server in range(self.servers) if self._pulls_of(server)]

    def heads(self, server: int, with_keys: bool) -> bytes:
        """Return what a frame says of each table. See `data_frame.PartOfServer`."""
        pulls = self._pulls_of(server)
        heads = [push.head(server, with_keys=with_keys) for push in self.pushes]
        return b"".join(heads + [pull.head(server) for pull in pulls])

    def payload_bytes(self, server: int, with_keys: bool) -> int:
        """Return how long the payload of a server is."""
        end = 0
        for array in self._arrays(server, with_keys=with_keys):
            end = aligned(end) + array.nbytes
        return end

    def write(self, server: int, with_keys: bool, memory: Bytes) -> None:
        """Write the payload of a server."""
        end = 0
        for array in self._arrays(server, with_keys=with_keys):
            start = aligned(end)
            memory[end:start] = 0
            end = start + array.nbytes
            memory[start:end] = array.reshape(-1).view(np.uint8)

    def rows_bytes(self, server: int) -> int:
        """Return how long the payload of a server's reply is."""
        end = 0
        for pull in self._pulls_of(server):
            end = aligned(end) + pull.row_bytes(server)
        return end

    def merge(self, payloads: Mapping[int, Bytes]) -> list[Rows]:
        """Return one (n, dim) array per pull, from each server's reply by its rank."""
        if self.servers == 1 and payloads:
            return self._rows(0, payloads[0])
        rows = [np.empty((pull.partition.size, pull.dim), np.float32) for pull in self.pulls]
        for server, payload in payloads.items():
            for pull, whole, part in zip(self.pulls, rows, self._rows(server, payload), strict=True):
                whole[pull.partition.positions(server)] = part
        return rows

    def _rows(self, server: int, payload: Bytes) -> list[Rows]:
        out, end = [], 0
        for pull in self.pulls:
            start = aligned(end)
            end = start + pull.row_bytes(server)
            out.append(pull.read(payload[start:end]))
        return out

    def _pulls_of(self, server: int) -> list[_Pull]:
        return self.pulls if any(pull.partition.count(server) for pull in self.pulls) else []

    def _arrays(self, server: int, *, with_keys: bool) -> list[Array]:
        arrays = [array for push in self.pushes for array in push.arrays(server, with_keys=with_keys)]
        return arrays + [pull.partition.take(pull.partition.keys, server) for pull in self._pulls_of(server)]
