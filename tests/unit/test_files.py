"""Files are written completely or not at all, and locks are held by one process at a time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx.files import file_lock, open_atomically, temporary_path, try_lock, write_atomically


def test_a_file_is_replaced_and_synced_with_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    sync = os.fsync

    def record(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    path = tmp_path / "value"
    for text in ("old", "new"):
        write_atomically(path, text)
    assert path.read_text() == "new"
    assert synced == [str(temporary_path(path)), str(tmp_path)] * 2
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "value"
    write_atomically(path, b"old")

    def fail() -> None:
        with open_atomically(path) as file:
            file.write(b"ne")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["folder", "file"])
def test_a_lock_has_one_holder(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
    with file_lock(path):
        assert try_lock(path) is None
    descriptor = try_lock(path)
    assert descriptor is not None
    waiting: list[str] = []
    with file_lock(path, lambda: (waiting.append("waits"), os.close(descriptor))[0]):
        assert waiting == ["waits"]
