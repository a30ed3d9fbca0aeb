"""Reports fit the terminal that they are printed to, and are whole where programs read them."""

from __future__ import annotations

import os

import pytest

from phalanx.launch.reports import terminal
from phalanx.launch.reports.terminal import columns_of, fit_terminal, wrap_lines

REPORT = """\
rank 1 is at train.py:9 in main: threads (join); it waits for a thread that sleeps
    rank 0  waits for 11 s in all_reduce 26 at /a/very/long/path/of/a/folder/train.py:12, called by nobody
  short
"""


def at_width(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((columns, 24)))
    monkeypatch.setattr(terminal.sys.stdout, "fileno", lambda: 1, raising=False)


def test_lines_break_between_words_and_their_rest_is_indented() -> None:
    assert wrap_lines(REPORT, 60).split("\n") == [
        "rank 1 is at train.py:9 in main: threads (join); it waits",
        "  for a thread that sleeps",
        "    rank 0  waits for 11 s in all_reduce 26 at",
        "      /a/very/long/path/of/a/folder/train.py:12, called by",
        "      nobody",
        "  short",
        "",
    ]


def test_what_fits_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    at_width(monkeypatch, 120)
    assert fit_terminal(REPORT) == REPORT


@pytest.mark.parametrize("columns", [60, 80])
def test_no_line_is_longer_than_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    at_width(monkeypatch, columns)
    lines = fit_terminal(REPORT).split("\n")
    assert max(map(len, lines)) <= columns
    assert " ".join(" ".join(lines).split()) == " ".join(REPORT.split())


def test_a_pipe_gets_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> os.terminal_size:
        raise OSError

    at_width(monkeypatch, 80)
    monkeypatch.setattr(os, "get_terminal_size", refuse)
    assert fit_terminal(REPORT) == REPORT
    at_width(monkeypatch, 0)  # a terminal that does not say how wide it is
    assert fit_terminal(REPORT) == REPORT


CHINESE = (
    "  rank 1（主机 node-1）在 train.py:9 的 main 中等待：线程（join）；"
    "它等待一个睡眠的线程，其他 rank 等待它已有 11 秒。"
)


@pytest.mark.parametrize("width", [20, 31, 60])
def test_chinese_lines_break_between_characters_by_columns(width: int) -> None:
    lines = wrap_lines(CHINESE, width).split("\n")
    assert len(lines) > 1
    assert max(map(columns_of, lines)) <= width
    assert min(columns_of(line) for line in lines[:-1]) > width - 15, "a line ends long before the terminal does"
    assert not any(line.lstrip()[0] in "，。：；）" for line in lines)
    assert not any(line[-1] in "（" for line in lines)
    assert "".join("".join(lines).split()) == "".join(CHINESE.split())
    assert "train.py:9" in " ".join(lines)


def test_columns_count_wide_and_combining_characters() -> None:
    assert columns_of("等待 a") == 6
    assert columns_of("e\N{COMBINING ACUTE ACCENT}") == 1


def test_text_for_standard_error_fits_its_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    def width_of(fd: int) -> os.terminal_size:
        if fd != 2:
            raise OSError
        return os.terminal_size((60, 24))

    monkeypatch.setattr(os, "get_terminal_size", width_of)
    with open(os.devnull, "w") as stream:
        monkeypatch.setattr(terminal.sys.stdout, "fileno", lambda: 1, raising=False)
        monkeypatch.setattr(terminal.sys.stderr, "fileno", lambda: 2, raising=False)
        assert fit_terminal(REPORT, terminal.sys.stderr) == wrap_lines(REPORT, 60)
        assert fit_terminal(REPORT) == REPORT
        assert fit_terminal(REPORT, stream) == REPORT
