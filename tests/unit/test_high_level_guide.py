"""The script and the numbers on the page about Model are real."""

from __future__ import annotations

import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from phalanx.train.callbacks.run import Run
from phalanx.train.model.auto_context import ALIASES, AutoContext
from phalanx.train.model.modes import ParallelMode

PAGE = (Path(__file__).parents[2] / "docs" / "high-level.md").read_text()
BLOCKS = [
    re.sub(r"^    ", "", block, flags=re.M) for block in re.findall(r"(?:^    .*\n|(?<=\n)\n(?=    ))+", PAGE, re.M)
]
SCRIPT, PRINTED, RESUMED = BLOCKS


def test_the_script_prints_what_the_page_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(SCRIPT, "train.py", "exec"), names)
    assert capsys.readouterr().out.split() == PRINTED.split()
    assert names["outputs"].shape == (360, 10)  # type: ignore[attr-defined]
    assert names["result"]["acc1"] > 0.9  # type: ignore[index]
    exec(compile(RESUMED, "train.py", "exec"), names)
    assert isinstance(names["run"], Run)
    assert names["run"].step == 5 * 23


def test_the_page_names_every_mode_and_setting() -> None:
    for name in (*(mode.name for mode in ParallelMode), *(field.name for field in fields(AutoContext)), "mirror_mean"):
        assert f"`{name}`" in PAGE
    assert ALIASES["mirror_mean"] == "gradients_mean"
