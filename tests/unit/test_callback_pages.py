"""What the pages on callbacks and evaluation show, runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import phalanx as px

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.findall(r"(?:^    .*\n|(?<=\n)\n(?=    ))+", text, re.MULTILINE)
    return [re.sub(r"^    ", "", block, flags=re.MULTILINE) for block in found]


def test_the_callbacks_shown_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    training, own, told = blocks("callbacks.md")
    for block in (training, own):
        exec(compile(block, "callbacks.md", "exec"), names)
    assert told.strip().startswith("ConfigError: on rank 1: callback GradientWatch failed")
    assert (tmp_path / "runs" / "digits.csv").read_text().count("\n") == 5
    assert sorted(path.name for path in (tmp_path / "runs" / "digits").iterdir())[0] == "best"
    watch = names["GradientWatch"]
    assert isinstance(watch, type)
    assert issubclass(watch, px.Callback)


def test_the_evaluations_shown_run(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    found = blocks("evaluation.md")
    for block in found:
        exec(compile(block, "evaluation.md", "exec"), names)
    assert len(found) == 3
    assert "recall" in capsys.readouterr().out
    assert isinstance(names["calibration"], list)
    assert len(names["calibration"]) == 10


@pytest.mark.parametrize("page", ["callbacks.md", "evaluation.md"])
def test_every_callback_and_metric_is_on_its_page(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    modules = {"callbacks.md": "phalanx.train.callbacks", "evaluation.md": "phalanx.train.metrics_"}
    ours = [name for name, home in px._HOMES.items() if home.startswith(modules[page])]
    assert [name for name in ours if f"px.{name}" not in text] == []
