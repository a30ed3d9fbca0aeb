"""Reports fit the terminal that they are printed to, and are whole where programs read them."""

from __future__ import annotations

import os

import pytest

from phalanx.launch.reports import terminal
from phalanx.launch.reports.terminal import fit_terminal, wrap_lines

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
