"""Downloads from a server of this machine: by one rank for all, broken off, refused, and unpacked."""

from __future__ import annotations

import hashlib
import io
import logging
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from file_server import CONTENT, PROXIES, Server, serving
from phalanx.data import download
from phalanx.data.readers import archive
from phalanx.errors import ConfigError, DataError, PeerLostError
from ranks import run_ranks

pytestmark = pytest.mark.dist

SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    with serving() as running:
        yield running


def _everyone(url: str, folder: str, digest: str) -> tuple[str, int]:
    logging.getLogger("phalanx").setLevel(logging.INFO)
    path = download(url, folder, sha256=digest)
    return str(path), path.stat().st_size


def test_one_of_four_ranks_downloads_and_all_have_the_file(server: Server, tmp_path: Path) -> None:
    found = list(run_ranks(_everyone, 4, server.url("data.bin"), str(tmp_path / "new"), SHA256))
    assert found == [(str(tmp_path / "new" / "data.bin"), len(CONTENT))] * 4
    assert server.asked == [("data.bin", None)]
    assert (tmp_path / "new" / "data.bin").read_bytes() == CONTENT
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == [".data.bin.lock", "data.bin"]


def test_a_download_that_was_broken_off_goes_on_where_it_was(server: Server, tmp_path: Path) -> None:
    server.ends_after = 300_000
    message = (
        r"the answer ended after 300000 of 1048576 bytes. Check the network, then call again to resume after 300000"
    )
    with pytest.raises(PeerLostError, match=message):
        download(server.url("data.bin"), tmp_path, sha256=SHA256)
    assert not (tmp_path / "data.bin").exists()
    server.ends_after = None
    assert download(server.url("data.bin"), tmp_path, sha256=SHA256.upper()).read_bytes() == CONTENT
    assert server.asked[1:] == [("data.bin", "bytes=300000-")]


def test_a_part_of_another_file_is_found_out_and_thrown_away(server: Server, tmp_path: Path) -> None:
    part = tmp_path / ".data.bin.part"
    part.write_bytes(b"another" * 10)
    with pytest.raises(DataError, match=r"has the checksum [0-9a-f]{64}, asked for .* It was resumed; call again"):
        download(server.url("data.bin"), tmp_path, sha256=SHA256)
    assert not part.exists()
    part.write_bytes(CONTENT + b"more")
    with pytest.raises(PeerLostError, match=r"the server said 416 .* then call again, or put the file at"):
        download(server.url("data.bin"), tmp_path, sha256=SHA256)
    assert download(server.url("data.bin"), tmp_path, sha256=SHA256).read_bytes() == CONTENT


@pytest.mark.usefixtures("phalanx_propagates")
def test_without_a_checksum_nothing_is_gone_on_with_and_it_is_said(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".data.bin.part").write_bytes(b"older")
    assert download(server.url("data.bin?x=1"), tmp_path).read_bytes() == CONTENT
    assert server.asked == [("data.bin", None)]
    assert f'data.bin was downloaded unchecked; pass sha256="{SHA256}"' in caplog.text
    download(server.url("data.bin"), tmp_path, sha256=SHA256)
    (tmp_path / "data.bin").write_bytes(b"changed")
    with pytest.raises(
        DataError, match=r"data.bin has the checksum .* Delete it to download it again, or correct sha256"
    ):
        download(server.url("data.bin"), tmp_path, sha256=SHA256)
    assert len(server.asked) == 1


def test_what_the_server_or_the_network_refuses_is_told(server: Server, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"/none, the server said 404 Not Found. Check the address."):
        download(server.url("none"), tmp_path)
    with pytest.raises(PeerLostError, match=r"the server said 503 Service Unavailable. Check the network"):
        download(server.url("busy"), tmp_path)
    with pytest.raises(DataError, match=f"has the checksum {SHA256}, asked for {'0' * 64}. Check the address and"):
        download(server.url("data.bin"), tmp_path, sha256="0" * 64)
    with pytest.raises(ConfigError, match=r"has 1048576 bytes or more, above max_bytes=1000. Give a larger"):
        download(server.url("data.bin"), tmp_path, max_bytes=1000)
    assert [p.name for p in tmp_path.iterdir() if not p.name.endswith(".lock")] == []
    server.redirects["away"] = f"file://{tmp_path}/data.bin"
    with pytest.raises(
        ConfigError, match=r"302 Found - Redirection to url 'file:///.*/data.bin' is not allowed. Check the"
    ):
        download(server.url("away"), tmp_path)
    server.redirects["ftp"] = "ftp://127.0.0.1/data.bin"
    with pytest.raises(ConfigError, match=r"/ftp, which redirects to ftp://127.0.0.1/data.bin. Only addresses with"):
        download(server.url("ftp"), tmp_path)
    server.redirects["moved"] = server.url("data.bin")
    assert download(server.url("moved"), tmp_path, sha256=SHA256) == tmp_path / "moved"
    closed = server.url("data.bin").replace(str(server.server_port), "1")
    with pytest.raises(PeerLostError, match=r"Connection refused. Check the network, then call again, or put the file"):
        download(closed, tmp_path)


def test_addresses_and_checksums_that_cannot_work_are_told(tmp_path: Path) -> None:
    for url in ("file:///etc/passwd", "data.bin", "https:///x"):
        with pytest.raises(ConfigError, match="Give an address that begins with https:// or http://"):
            download(url, tmp_path)
    with pytest.raises(ConfigError, match=r"which ends in no name of a file"):
        download("https://example.org/", tmp_path)
    with pytest.raises(ConfigError, match=r"Got sha256='abc'. Give 64 hexadecimal digits"):
        download("https://example.org/x", tmp_path, sha256="abc")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"which failed: Not a directory. Give a folder"):
        download("https://example.org/x", tmp_path / "file" / "below")


# -- archives --------------------------------------------------------------------------------------------------------


def tar_of(members: dict[str, bytes], **odd: Any) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            for key, value in odd.items():
                setattr(info, key, value)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def zip_of(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in members.items():
            packed.writestr(name, content)
    return buffer.getvalue()


def test_an_archive_is_unpacked_once_beside_what_is_there(server: Server, tmp_path: Path) -> None:
    server.files = {
        "a.tar.gz": tar_of({"set/train/1": b"one", "set/2": b"two"}),
        "b.zip": zip_of({"set/": b"", "set/3": b"three"}),
    }
    for name in ("a.tar.gz", "b.zip", "a.tar.gz"):
        assert download(server.url(name), tmp_path, unpack=True) == tmp_path
    found = {str(path.relative_to(tmp_path)): path.read_text() for path in (tmp_path / "set").rglob("*[123]")}
    assert found == {"set/train/1": "one", "set/2": "two", "set/3": "three"}
    assert len(server.asked) == 2
    (tmp_path / "set" / "2").write_text("mine")
    download(server.url("a.tar.gz"), tmp_path, unpack=True)
    assert (tmp_path / "set" / "2").read_text() == "mine"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (tar_of({"ok": b"1", "../out": b"2"}), r"holds '../out', which would lie outside the folder"),
        (tar_of({"/etc/out": b"2"}), r"holds '/etc/out', which would lie outside"),
        (zip_of({"a/../../out": b"2"}), r"holds 'a/../../out', which would lie outside"),
        (zip_of({"..\\out": b"2"}), r"which would lie outside"),
        (tar_of({"link": b""}, type=tarfile.SYMTYPE, linkname="/etc"), r"holds the link 'link'. Unpack by hand"),
        (tar_of({"pipe": b""}, type=tarfile.FIFOTYPE), r"holds the device 'pipe'"),
        (zip_of({"big": bytes(2_000_000)}), r"holds more than max_bytes=1000000 bytes"),
        (tar_of({"x": bytes(range(256)) * 99})[:-30], r"the archive is broken|is cut off|neither a zip"),
        (b"plain text", r"it is neither a zip nor a tar archive. Leave unpack out"),
    ],
)
def test_an_archive_that_is_not_to_be_trusted_leaves_nothing(tmp_path: Path, content: bytes, message: str) -> None:
    packed, folder = tmp_path / "packed", tmp_path / "folder"
    packed.write_bytes(content)
    folder.mkdir()
    with pytest.raises(DataError, match=rf"{packed}: .*{message}"):
        archive.unpack_into(packed, folder, max_bytes=1_000_000)
    assert list(folder.iterdir()) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "packed"]
