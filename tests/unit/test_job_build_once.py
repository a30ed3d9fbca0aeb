"""Things that are made once and kept: whole or not at all, whoever was killed before."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from phalanx.jobs.sources import build_once as build_once_module
from phalanx.jobs.sources.build_once import Progress, build_once


def test_what_a_killed_process_had_made_is_made_anew(tmp_path: Path) -> None:
    target = tmp_path / "kept" / "tree"
    (tmp_path / "kept" / ".tree.part").mkdir(parents=True)
    (tmp_path / "kept" / ".tree.part" / "half").write_text("")

    def make(part: Path) -> None:
        part.mkdir()
        (part / "whole").write_text("")

    assert build_once(target, make) == build_once(target, lambda part: pytest.fail("made twice"))
    assert [path.name for path in target.iterdir()] == ["whole"]


def test_what_could_not_be_made_is_not_there_and_is_tried_again(tmp_path: Path) -> None:
    def fail(part: Path) -> None:
        part.write_text("half")
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        build_once(tmp_path / "file", fail)
    assert [path.name for path in tmp_path.iterdir()] == [".file.lock"]
    assert build_once(tmp_path / "file", lambda part: part.touch()).exists()


def test_long_work_says_how_far_it_is(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, phalanx_propagates: None
) -> None:
    now = 0.0
    monkeypatch.setattr(build_once_module.time, "monotonic", lambda: now)
    progress = Progress("copying", 10_000_000)
    with caplog.at_level(logging.INFO, "phalanx.jobs"):
        for now in (1.0, 4.0, 6.0, 7.0, 12.0):  # noqa: B007
            progress.add(1_000_000)
    assert caplog.messages == ["copying: 3.0 MB of 10.0 MB", "copying: 5.0 MB of 10.0 MB"]
