"""Hosts that a server connects to for its members."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import file_server
from phalanx.errors import ConfigError, SpecError
from phalanx.jobs.limits import Limits
from phalanx.jobs.sources.datasets import pin
from phalanx.jobs.sources.egress import EgressPolicy, is_public
from phalanx.jobs.spec.code_and_data import Dataset


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[file_server.Server]:
    for name in file_server.PROXIES:
        monkeypatch.delenv(name, raising=False)
    with file_server.serving() as running:
        yield running


def at(uri: str) -> Dataset:
    return Dataset(name="d", kind="http", uri=uri)


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        ("64:ff9b::5db8:d822", True),
        *((address, False) for address in ("127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.0.1", "169.254.169.254")),
        *((address, False) for address in ("0.0.0.0", "100.64.0.1", "224.0.0.1", "::1", "fe80::1", "fd00::1", "::")),
        *((address, False) for address in ("::ffff:10.0.0.1", "2002:7f00:1::", "64:ff9b::a00:1", "ff02::1")),
    ],
)
def test_addresses_are_public_or_not_however_they_are_written(address: str, public: bool) -> None:
    assert is_public(ipaddress.ip_address(address)) is public


def test_a_server_asks_no_host_of_its_own_network_unless_it_is_listed(web: file_server.Server) -> None:
    for uri in (web.url("data.bin"), web.url("data.bin").replace("127.0.0.1", "localhost"), "http://[::1]:9/x"):
        with pytest.raises(SpecError, match=r"no host with a public address, .* lists the host under `hosts`"):
            pin(at(uri), None, egress=EgressPolicy())
    with pytest.raises(SpecError, match=r"there.invalid is no host with a public address"):
        pin(at("http://there.invalid/x"), None, egress=EgressPolicy())
    assert not web.asked
    size = len(file_server.CONTENT)
    assert pin(at(web.url("data.bin")), None, egress=EgressPolicy(("127.0.0.0/8",))).size == size
    assert (
        pin(at(web.url("data.bin").replace("127.0.0.1", "localhost")), None, egress=EgressPolicy(("localhost",))).size
        == size
    )
    assert len(web.asked) == 2
    with pytest.raises(SpecError, match="no host with a public address"):
        pin(Dataset(name="d", kind="s3", uri="s3://b/x", endpoint=web.url("")), None, egress=EgressPolicy())
    assert len(web.asked) == 2


def test_a_redirect_is_looked_at_as_an_address_is(web: file_server.Server) -> None:
    web.redirects["there"] = web.url("data.bin").replace("127.0.0.1", "127.0.0.2")
    web.redirects["here"] = web.url("data.bin")
    allowed = EgressPolicy(("127.0.0.1",))
    assert pin(at(web.url("here")), None, egress=allowed).size == len(file_server.CONTENT)
    with pytest.raises(SpecError, match=r"127.0.0.2 is no host with a public address"):
        pin(at(web.url("there")), None, egress=allowed)
    assert [name for name, _ in web.asked] == ["here", "data.bin", "there"]


def test_a_name_is_resolved_once_and_that_address_is_connected_to(
    web: file_server.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    resolve = socket.getaddrinfo

    def answer(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host == "data.example":
            names.append(host)
            # What a second look would find is nobody's server: the name has moved on.
            host = "127.0.0.1" if len(names) == 1 else "192.0.2.1"
        return resolve(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    uri = web.url("data.bin").replace("127.0.0.1", "data.example")
    assert pin(at(uri), None, egress=EgressPolicy(("data.example",))).size == len(file_server.CONTENT)
    assert names == ["data.example"]


def test_hosts_are_read_from_the_settings_of_the_server(tmp_path: Path) -> None:
    (tmp_path / "server.yaml").write_text("hosts: [Data.Example, 10.1.0.0/16, '::1']\n")
    assert Limits.read(tmp_path).egress == EgressPolicy(("data.example", "10.1.0.0/16", "::1"))
    assert Limits(tmp_path).egress == EgressPolicy()
    for wrong in ("http://x", "10.1.0.1/16", "*.example", "a:80"):
        (tmp_path / "server.yaml").write_text(f"hosts: ['{wrong}']\n")
        with pytest.raises(ConfigError, match=r"server.yaml of this server cannot be read"):
            Limits.read(tmp_path)
