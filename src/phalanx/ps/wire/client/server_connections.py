"""`ServerConnections`: a connection to every server of a job; made anew when the job has another number of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import Protocol, overload

from phalanx.ps.wire.client.connection import Connection, ServersMovedError
from phalanx.ps.wire.client.server_layout import LayoutFile

_log = logging.getLogger("phalanx.ps")


class Connect(Protocol):
    """Makes a connection to one server."""

    def __call__(self, endpoint: str, rank: int, has_moved: Callable[[], bool]) -> Connection:
        """Return the connection; see `Connection`."""
        ...


class ServerConnections(Sequence[Connection]):
    """The connections, by the servers' ranks.

    Args:
        layout: Says which servers there are.
        connect: Connects to one.

    Raises:
        PeerLostError: If a server does not come; names it.
    """

    def __init__(self, layout: LayoutFile, connect: Connect) -> None:
        self._layout, self._connect = layout, connect
        self._number = -1
        self._connections: list[Connection] = []
        self.follow()

    def follow(self) -> bool:
        """Connect to the servers that the job has now; returns whether they are others than before.

        Requests without an answer raise `ServersMovedError`. After an error they are those there were, and the next
        call tries again.
        """
        before = self._number
        while True:
            number, endpoints = self._layout.read()
            if number == self._number:
                return number != before
            if before >= 0:
                _log.info("%d servers instead of %d", len(endpoints), len(self._connections))
            with suppress(ServersMovedError):
                newer = self._open(endpoints, partial(self._layout.is_newer, number))
                older, self._number, self._connections = self._connections, number, newer
                for connection in older:
                    connection.close()

    def _open(self, endpoints: Sequence[str], has_moved: Callable[[], bool]) -> list[Connection]:
        with ExitStack() as opened:
            connections = [
                opened.enter_context(closing(self._connect(endpoint, rank, has_moved)))
                for rank, endpoint in enumerate(endpoints)
            ]
            opened.pop_all()
        return connections

    def close(self) -> None:
        """Close them all."""
        for connection in self._connections:
            connection.close()
        self._connections = []

    @overload
    def __getitem__(self, index: int) -> Connection: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Connection]: ...

    def __getitem__(self, index: int | slice) -> Connection | Sequence[Connection]:
        return self._connections[index]

    def __len__(self) -> int:
        return len(self._connections)

    def __iter__(self) -> Iterator[Connection]:
        return iter(self._connections)
