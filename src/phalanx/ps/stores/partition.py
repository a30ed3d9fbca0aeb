"""`PartitionedRequest`: a pull or push of any number of tables, cut into a part per server, and its rows merged.

The native core does the work; `partition_numpy` takes over where it is not installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from phalanx.ps.stores.base import Keys, Rows
from phalanx.ps.stores.update import KINDS, TableUpdate
from phalanx.ps.table.placement import check_servers
from phalanx.ps.wire.frame import Bytes
from phalanx.versions import HAS_NATIVE

if HAS_NATIVE:
    from phalanx import _core

PullNumbers = NDArray[np.uint64]
"""What each server calls a pull, by the server's rank; 0 where it has no name."""


class KeyPartition(Protocol):
    """Which of a table's ids go to which server."""

    @property
    def size(self) -> int:
        """How many ids there are."""
        ...


class PartitionedRequest(Protocol):
    """The updates and pulls of one request. Arrays stay the caller's, who does not change them until it is answered.

    A `server` is a rank. `with_keys` says whether keys come along even where an earlier pull brought them.
    """

    @property
    def servers(self) -> int:
        """How many servers there are."""
        ...

    def add_push(
        self, update: TableUpdate, partition: Any, pulls: PullNumbers | None, *, is_narrow: bool = False
    ) -> None:
        """Add an update, checked; its keys stay here where a server can take those of an earlier pull.

        With `is_narrow` its values travel as bfloat16.
        """
        ...

    def add_pull(self, partition: Any, dim: int, *, is_narrow: bool = False) -> None:
        """Add rows to read, which are the next of the arrays of `merge`; with `is_narrow` they come as bfloat16."""
        ...

    def counts(self, server: int) -> tuple[int, int]:
        """Return how many tables a server's part pushes and reads: it reads none if it has none of the keys."""
        ...

    def read_servers(self) -> list[int]:
        """Return the servers that own some of the keys that are read, in ascending order."""
        ...

    def heads(self, server: int, with_keys: bool) -> bytes:
        """Return what a frame says of each table. See `data_frame.PartOfServer`."""
        ...

    def payload_bytes(self, server: int, with_keys: bool) -> int:
        """Return how long the payload of a server is."""
        ...

    def write(self, server: int, with_keys: bool, memory: Bytes) -> None:
        """Write the payload of a server."""
        ...

    def rows_bytes(self, server: int) -> int:
        """Return how long the payload of a server's reply is."""
        ...

    def merge(self, payloads: Mapping[int, Bytes]) -> list[Rows]:
        """Return one (n, dim) array per pull, from each server's reply by its rank.

        With one server and no bfloat16 the arrays are views of its reply.
        """
        ...


@dataclass(frozen=True, slots=True)
class ServerPart:
    """The part of a request that goes to one server, as a `DataRequest` takes it."""

    request: PartitionedRequest
    server: int
    with_keys: bool = False
    """Whether the keys come along even where an earlier pull had them."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of keys, values and columns."""
        return self.request.payload_bytes(self.server, self.with_keys)

    @property
    def rows_bytes(self) -> int:
        """Bytes of the rows that it reads."""
        return self.request.rows_bytes(self.server)

    @property
    def counts(self) -> tuple[int, int]:
        """Tables it pushes, and tables it reads."""
        return self.request.counts(self.server)

    def heads(self) -> bytes:
        """Return what the frame says of each table."""
        return self.request.heads(self.server, self.with_keys)

    def write(self, memory: Bytes) -> None:
        """Write the payload."""
        self.request.write(self.server, self.with_keys, memory)


def partition_keys(keys: Keys, salt: int, servers: int) -> KeyPartition:
    """Return which of a table's ids go to which of so many servers.

    Raises:
        ConfigError: If there are fewer than 1 or more than 1024 servers.
    """
    check_servers(servers)
    if HAS_NATIVE:
        return _core.KeyPartition(keys, salt, servers)
    from phalanx.ps.stores.partition_numpy import NumpyPartition

    return NumpyPartition.of(keys, salt, servers)


def partitioned_request(servers: int) -> PartitionedRequest:
    """Return a request without tables."""
    if HAS_NATIVE:
        return NativeRequest(servers)
    from phalanx.ps.stores.partition_numpy import NumpyRequest

    return NumpyRequest(servers)


if HAS_NATIVE:

    class NativeRequest(_core.PartitionedRequest):
        """See `PartitionedRequest`."""

        def __init__(self, servers: int) -> None:
            super().__init__()
            self.servers = servers
            self._shapes: list[tuple[int, int]] = []
            self._has_views = servers == 1

        def add_push(  # type: ignore[override]
            self, update: TableUpdate, partition: Any, pulls: PullNumbers | None, *, is_narrow: bool = False
        ) -> None:
            """See `PartitionedRequest.add_push`."""
            kind, columns = KINDS.index(update.kind), (update.counts, update.shows, update.clicks)
            super().add_push(partition, pulls, update.values, kind, update.lr, *columns, is_narrow)

        def add_pull(self, partition: _core.KeyPartition, dim: int, *, is_narrow: bool = False) -> None:  # type: ignore[override]
            """See `PartitionedRequest.add_pull`."""
            super().add_pull(partition, dim, is_narrow)
            self._shapes.append((partition.size, dim))
            self._has_views &= not is_narrow

        def merge(self, payloads: Mapping[int, Bytes]) -> list[Rows]:
            """See `PartitionedRequest.merge`."""
            if self._has_views and payloads:
                return self.rows(payloads[0])
            rows = self._empty_rows()
            self.merge_parts(list(payloads.items()), rows)
            return rows

        def merge_sent(self, sent: _core.SentRequest) -> list[Rows]:
            """Return what `merge` does, of replies that all came natively."""
            if self._has_views and self._shapes and sent.size:
                return self.rows(sent.rows(0))
            rows = self._empty_rows()
            self.merge_replies(sent, rows)
            return rows

        def _empty_rows(self) -> list[Rows]:
            # In one piece: the system gives out pages of many small ones anew in every step.
            values = np.empty(sum(keys * dim for keys, dim in self._shapes), np.float32)
            rows, start = [], 0
            for keys, dim in self._shapes:
                rows.append(values[start : start + keys * dim].reshape(keys, dim))
                start += keys * dim
            return rows
