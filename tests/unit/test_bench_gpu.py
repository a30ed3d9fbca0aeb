"""`make gpu`: the sentence where no GPU is visible, the page, and commands of its cases."""

from __future__ import annotations

import pytest

from benchmarks.gpu import __main__ as bench
from benchmarks.gpu.cases import CASES
from phalanx import accelerator


def test_without_a_gpu_it_says_so_and_runs_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(accelerator, "find_kind", lambda: None)
    monkeypatch.setattr(bench.sys, "argv", ["gpu"])
    monkeypatch.setattr(bench, "run", lambda *_: pytest.fail("something was run"))
    assert bench.main() == 2
    assert "No GPU is visible here, so nothing was run and no page was written." in capsys.readouterr().out


def test_the_page_holds_tests_figures_and_failures() -> None:
    results = [
        bench.Result("pytest -m gpu", 60.0, summary="5 passed in 60.00s"),
        bench.Result("amp", 20.0, figures={"bfloat16, samples/s": 123456.7}),
        bench.Result("sink", 10.0, problem="RuntimeError: no"),
    ]
    text = bench.page("NVIDIA X", results, "2026-11-24")
    assert "Tests: 5 passed in 60.00s" in text
    assert "| amp | bfloat16, samples/s | 123,457 |" in text
    assert "## sink failed" in text
    assert "`make gpu`, 90 s" in text


def test_every_case_has_a_command_and_the_sparse_one_a_server() -> None:
    for case in CASES:
        command = bench.command_of(case, quick=True, log_dir="log")
        assert command[-2:] == [case, "--quick"]
        assert ("--server-num" in command) == (case == "sparse")


def test_a_command_that_takes_too_long_is_ended() -> None:
    _, code, text = bench.run("sleep", [bench.sys.executable, "-c", "import time; time.sleep(60)"], 0.0)
    assert code == 124
    assert text == "sleep took longer than 0 s"
