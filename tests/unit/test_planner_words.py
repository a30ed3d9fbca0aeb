"""What users tell the planner is read before it works, and what it tells them is in their language."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import phalanx as px
from phalanx.auto import commands, model_search
from phalanx.cli.plan import command
from phalanx.errors import ConfigError

DESCRIBED = {
    "model": {"layers": 4, "hidden": 256, "heads": 8, "seq": 128, "vocab": 1000},
    "batch": {"global": 16},
}


class Scaled(nn.Module):
    """Layers in another order than they run, and a parameter that has no dim."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.first = nn.Linear(16, 4), nn.Linear(8, 16)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) * self.scale


def planned(**settings: Any) -> Any:
    return px.auto_parallel(Scaled(), torch.zeros(8, 8), cluster="a100x2", **settings)


def never(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("it searched")


@pytest.mark.parametrize("words", ["limits", "alternatives"])
def test_layers_that_are_not_there_are_named_before_the_search(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    monkeypatch.setattr(model_search, "search_plans", never)
    said = r"'frist=column': the model calls no layer 'frist'\. Did you mean 'first'\? It calls first, second\."
    with pytest.raises(ConfigError, match=said):
        planned(**{words: ["frist=column"]})


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ("head=colum", r"or a layer and one of whole, column.*Did you mean 'column'\?"),
        ("ttp<=2", r"Write a knob .* Did you mean 'tp'\?"),
        ("head", r"Write a knob"),
    ],
)
def test_wrong_words_are_said_before_the_script_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, message: str
) -> None:
    (tmp_path / "stops.py").write_text("raise SystemExit('it ran')")
    monkeypatch.chdir(tmp_path)
    for flag in ("--limit", "--why-not"):
        done = CliRunner().invoke(command, ["stops.py", "--cluster", "a100x2", flag, limit])
        with pytest.raises(ConfigError, match=message):
            raise done.exception or AssertionError(done.output)


def test_wrong_words_are_said_before_a_described_run_is_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "search", never)
    (tmp_path / "gpt.json").write_text(json.dumps(DESCRIBED))
    flags = ["--cluster", "h100x2", "--why-not", "ttp=1"]
    done = CliRunner().invoke(command, [str(tmp_path / "gpt.json"), *flags])
    with pytest.raises(ConfigError, match=r"'ttp=1'.*Did you mean 'tp'\?"):
        raise done.exception or AssertionError(done.output)


def test_the_answer_is_in_the_users_language(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_LANG", "zh")
    answer = planned()
    assert answer.left_out[:2] == (
        "流水线，因为前向计算没有按创建顺序调用模型的各单元",
        "ZeRO 切分，因为参数 'scale' 没有可切的维：请把它的形状改为 (1,)",
    )
    shown = str(answer)
    assert "未搜索：ZeRO 切分" in shown
    assert "；ZeRO 0；重计算 recompute none；最外层 data；层 3 个选择" in shown.replace("\n", " ")
    assert "前向 ms" in answer.explain("first")
    assert answer.limited_by in answer.search.best.parts  # a word for programs stays what it is
