"""`ServerConnections` goes over to the servers that `layout.json` names, to all of them or to none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import DataError, PeerLostError
from phalanx.ps.wire.client.connection import ServersMovedError
from phalanx.ps.wire.client.server_connections import ServerConnections
from phalanx.ps.wire.client.server_layout import LayoutFile, ServerLayout, read_layout


class FakeConnection:
    """A connection to a server that a test has."""

    def __init__(self, endpoint: str, has_moved: Callable[[], bool]) -> None:
        self.endpoint, self.has_moved, self.is_open = endpoint, has_moved, True

    def close(self) -> None:
        self.is_open = False


class Network:
    """Servers, some of which do not answer."""

    def __init__(self) -> None:
        self.errors: dict[str, Exception] = {}
        self.opened: list[FakeConnection] = []

    def connect(self, endpoint: str, rank: int, has_moved: Callable[[], bool]) -> Any:
        if endpoint in self.errors:
            raise self.errors.pop(endpoint)
        self.opened.append(FakeConnection(endpoint, has_moved))
        return self.opened[-1]

    @property
    def open(self) -> list[str]:
        return [connection.endpoint for connection in self.opened if connection.is_open]


def test_a_server_that_does_not_come_leaves_the_connections_there_were(tmp_path: Path) -> None:
    path, network = tmp_path / "layout.json", Network()
    connections = ServerConnections(LayoutFile(path, ("a:1", "a:2")), network.connect)
    older = list(connections)
    ServerLayout(1, ("a:3", "a:4", "a:5"), "layout-1").write(path)
    assert all(connection.has_moved() for connection in network.opened)
    network.errors["a:5"] = PeerLostError("server 2 does not answer")
    with pytest.raises(PeerLostError, match="server 2"):
        connections.follow()
    assert (list(connections), network.open) == (older, ["a:1", "a:2"])
    assert connections.follow()
    assert [connection.endpoint for connection in network.opened[-3:]] == network.open == ["a:3", "a:4", "a:5"]
    assert list(connections) == network.opened[-3:]
    assert not any(connection.has_moved() for connection in network.opened[-3:])
    assert not connections.follow()


def test_servers_that_move_on_meanwhile_are_followed(tmp_path: Path) -> None:
    path, network = tmp_path / "layout.json", Network()
    connections = ServerConnections(LayoutFile(path, ("a:1",)), network.connect)
    ServerLayout(2, ("a:3", "a:4"), "layout-2").write(path)
    network.errors["a:4"] = ServersMovedError("the job has other servers now")
    assert connections.follow()
    assert network.open == ["a:3", "a:4"]
    connections.close()
    assert not network.open


def test_servers_that_do_not_come_at_the_start_leave_nothing_open(tmp_path: Path) -> None:
    network = Network()
    network.errors["a:2"] = PeerLostError("server 1 does not answer")
    with pytest.raises(PeerLostError, match="server 1"):
        ServerConnections(LayoutFile(tmp_path / "layout.json", ("a:1", "a:2")), network.connect)
    assert not network.open


@pytest.mark.parametrize("folder", ["/etc", "..", "layout-1/../..", "layout-", "layout-1\\n", ""])
def test_a_layout_names_a_folder_beside_it(tmp_path: Path, folder: str) -> None:
    path = tmp_path / "layout.json"
    path.write_text(f'{{"number": 1, "endpoints": ["a:1"], "folder": "{folder}"}}')
    with pytest.raises(DataError, match=r"layout\.json does not say which servers the job has"):
        read_layout(path)
