"""The list of a job's checkpoints: it shows what is the job's own, whatever a job leaves in its folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from phalanx.checkpoint.folder.marker import COMPLETE
from phalanx.jobs.attempt.checkpoints import SavedCheckpoint, list_saved

MARKER = {
    "save": "5f0c1b2a",
    "sequence": 1,
    "step": 1,
    "manifest": "manifest-5f0c1b2a.json",
    "sha256": "",
    "version": 1,
}


def save(folder: Path, step: int, text: str = json.dumps(MARKER)) -> Path:
    """Write what stands for a complete checkpoint; return its folder."""
    path = folder / f"step-{step}"
    path.mkdir(parents=True)
    (path / "rank-0-5f0c1b2a.safetensors").write_bytes(bytes(1000))
    (path / COMPLETE).write_text(text)
    return path


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    folder = tmp_path / "job" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """The folder of another job."""
    save(tmp_path / "other", 7)
    return tmp_path / "other"


def listed(shared: Path) -> dict[str, SavedCheckpoint]:
    return {one.folder: one for one in list_saved(shared)}


def test_complete_and_unfinished_ones_are_listed_with_their_bytes(shared: Path) -> None:
    save(shared, 3)
    (save(shared / "best", 2) / COMPLETE).unlink()
    (shared / "step-one").mkdir()
    found = listed(shared)
    assert {name: one.state for name, one in found.items()} == {"step-3": "complete", "best/step-2": "unfinished"}
    assert (found["step-3"].step, found["best/step-2"].bytes) == (3, 1000)
    assert found["step-3"].bytes == 1000 + len(json.dumps(MARKER))


def test_links_are_not_followed(shared: Path, foreign: Path, tmp_path: Path) -> None:
    (shared / "step-7").symlink_to(foreign / "step-7")
    (shared / "best").symlink_to(foreign)
    (tmp_path / "secret").write_text(json.dumps({"password": "xyzzy"}))
    marker = save(shared, 8) / COMPLETE
    marker.unlink()
    marker.symlink_to(tmp_path / "secret")
    (shared / "step-8" / "more").symlink_to(foreign)
    (found,) = list_saved(shared)
    assert (found.folder, found.state, found.bytes) == ("step-8", "unreadable", 1000)
    assert "password" not in found.why
    link = tmp_path / "link"
    link.symlink_to(foreign)
    assert list_saved(link) == []


@pytest.mark.timeout(20)
def test_what_is_no_marker_is_not_waited_for(shared: Path) -> None:
    for step, make in enumerate((os.mkfifo, os.mkdir, Path.touch)):
        marker = save(shared, step) / COMPLETE
        marker.unlink()
        make(marker)
    with (save(shared, 3) / COMPLETE).open("w") as file:
        file.truncate(1 << 40)
    save(shared, 4, "[1, 2]")
    save(shared, 5, json.dumps(MARKER | {"version": 99}))
    found = listed(shared)
    assert {one.state for one in found.values()} == {"unreadable"}
    assert len(found) == 6
    assert "version 99" in found["step-5"].why
    assert str(shared) not in "".join(one.why for one in found.values())


def test_folders_whose_names_cannot_be_shown_are_left_out(shared: Path) -> None:
    save(shared, 1)
    (shared / os.fsdecode(b"caf\xe9") / "step-2").mkdir(parents=True)
    (shared / "new\nline" / "step-3").mkdir(parents=True)
    os.utime(shared / "step-1" / COMPLETE, (0, 0))
    assert list(listed(shared)) == ["step-1"]


def test_the_newest_hundred_are_listed(shared: Path) -> None:
    for step in range(103):
        os.utime(save(shared, step) / COMPLETE, (step, step))
    found = list_saved(shared)
    assert [one.step for one in found] == list(range(102, 2, -1))


def test_a_folder_that_is_not_there_has_none(shared: Path) -> None:
    assert list_saved(shared / "absent") == []
