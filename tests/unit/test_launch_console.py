"""What of the other ranks reaches the terminal."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest

from phalanx.launch.process.log_format import LineFormatter
from phalanx.launch.reports.console import AlarmAggregator, AlarmFilter, Console
from phalanx.launch.reports.log_tail import last_lines


@pytest.mark.parametrize(
    "line",
    [
        "WARNING:root:watch out",
        "2026-01-01 ERROR something",
        "/a/b.py:3: UserWarning: careful",
        "W0506 11:36:35.667778  6697 device_context.cc:362] note",
        "[W1121 04:43:35 socket.cpp:464] [c10d] slow",
        "Fatal Python error: Segmentation fault",
        "terminate called without an active exception",
        "ValueError: bad",
    ],
)
def test_alarms_are_picked_out(line: str) -> None:
    assert AlarmFilter().feed(line + "\n") == [line]


@pytest.mark.parametrize("line", ["step 3 loss 0.1", "error rate: 0.3", "I0506 11:32:51.8 ok", "  File 'x'", ""])
def test_ordinary_lines_are_not(line: str) -> None:
    assert AlarmFilter().feed(line + "\n") == []


def test_a_traceback_is_one_block_even_when_it_comes_in_pieces() -> None:
    alarms = AlarmFilter()
    text = 'x\nTraceback (most recent call last):\n  File "a.py", line 1\n    boom()\nValueError: bad\ny\n'
    found = [alarm for start in range(0, len(text), 7) for alarm in alarms.feed(text[start : start + 7])]
    assert found == ['Traceback (most recent call last):\n  File "a.py", line 1\n    boom()\nValueError: bad']


def test_ctrl_c_in_other_ranks_is_not_told() -> None:
    text = 'Traceback (most recent call last):\n  File "a.py", line 1\nKeyboardInterrupt\nWARNING: not saved\n'
    assert AlarmFilter().feed(text) == ["WARNING: not saved"]


def test_a_progress_bar_shows_its_last_state() -> None:
    assert AlarmFilter().feed("10%\r20%\rWARNING: done\r\n") == ["WARNING: done"]


def test_identical_lines_of_many_ranks_become_one() -> None:
    folder = AlarmAggregator(hold_s=0.3)
    for rank in (1, 2, 3):
        folder.add(f"rank {rank}", "WARNING: x", now=10.0)
    folder.add("rank 1", "WARNING: y", now=10.1)
    assert folder.due(10.2) == []
    assert folder.due(10.35) == ["rank 1, rank 2, rank 3: WARNING: x (x3)"]
    assert folder.due(10.5) == ["rank 1: WARNING: y"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("WARNING 2026-11-21 04:43:36,170 x.py:7] slow disk", "WARNING 2026-11-21 04:43:37,002 x.py:7] slow disk"),
        ("W0506 11:36:35.667778  6697 x.cc:1] slow", "W0507 00:00:00.000001  12 x.cc:1] slow"),
    ],
)
def test_lines_that_differ_only_in_time_and_process_are_the_same(first: str, second: str) -> None:
    folder = AlarmAggregator()
    folder.add("rank 1", first, now=0.0)
    folder.add("rank 2", second, now=0.0)
    assert folder.due(1.0) == [f"rank 1, rank 2: {first} (x2)"]


def test_torchs_own_rank_prefix_is_taken_off() -> None:
    text = "[rank1]: Traceback (most recent call last):\n[rank1]:   File 'a'\n[rank1]: ValueError: bad\n"
    assert AlarmFilter().feed(text) == ["Traceback (most recent call last):\n  File 'a'\nValueError: bad"]


def test_a_line_that_keeps_coming_is_counted() -> None:
    folder = AlarmAggregator(hold_s=0.3, again_s=5.0)
    folder.add("rank 1", "WARNING: x", now=0.0)
    assert folder.due(0.4) == ["rank 1: WARNING: x"]
    for _ in range(8):
        folder.add("rank 1", "WARNING: x", now=1.0)
    assert folder.due(2.0) == []
    assert folder.due(5.5) == ["rank 1: WARNING: x (x8)"]


def test_a_report_that_follows_drops_held_tracebacks() -> None:
    folder = AlarmAggregator()
    folder.add("rank 1", "Traceback (most recent call last):\nValueError: bad", now=0.0)
    folder.add("rank 1", "WARNING: x", now=0.0)
    assert folder.drain(drop_tracebacks=True) == ["rank 1: WARNING: x"]


def test_own_lines_never_join_a_line_of_the_live_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live, other = tmp_path / "workerlog.0", tmp_path / "workerlog.1"
    live.write_text("of the attempt before\n")
    other.touch()
    console = Console()
    console.follow(str(live), [("rank 1", str(other))])
    with live.open("a") as file:
        file.write("10%\r20%")
    other.write_text("quiet\nWARNING: loud\n")
    console.finish(failed=False)
    assert capsys.readouterr().out == "10%\r20%\nrank 1: WARNING: loud\n"


def test_a_log_that_is_followed_again_is_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "serverlog.2"
    log.touch()
    console = Console()
    console.follow(None, [("server 2", str(log))])
    console.follow_another("server 2", str(log))
    log.write_text("WARNING: loud\n")
    console.finish(failed=False)
    assert capsys.readouterr().out == "server 2: WARNING: loud\n"


def test_last_lines_leave_out_what_a_progress_bar_overwrote(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("a\n1%\r2%\r3%\n\nb\n")
    assert last_lines(str(path), 2) == ["3%", "b"]
    assert last_lines(str(tmp_path / "none"), 2) == []


def record() -> logging.LogRecord:
    return logging.LogRecord("phalanx", logging.INFO, "/x/launch.py", 47, "hello %s", ("you",), None)


def test_log_lines_have_the_documented_forms() -> None:
    assert re.fullmatch(
        r"INFO \d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} launch\.py:47\] hello you",
        LineFormatter("default").format(record()),
    )
    assert re.fullmatch(
        r"INFO\|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\|/x/launch\.py\|47\|hello you", LineFormatter("bar").format(record())
    )
    fields = json.loads(LineFormatter("json").format(record()))
    assert (fields["level"], fields["path"], fields["line"], fields["message"]) == (
        "INFO",
        "/x/launch.py",
        47,
        "hello you",
    )


def test_of_a_crash_in_native_code_the_thread_that_crashed_is_shown(tmp_path: Path) -> None:
    other = ["Thread 0x1 (most recent call first):", *(f'  File "reporter.py", line {i} in run' for i in range(30))]
    crashed = ["Current thread 0x2 (most recent call first):", '  File "train.py", line 4 in <module>']
    below = [
        '  File "/x/phalanx/launch/process/entry.py", line 235 in _run_as_main',
        '  File "<string>", line 1 in main',
    ]
    error = "Fatal Python error: Segmentation fault"
    path = tmp_path / "log"
    path.write_text("\n".join(["step 3", error, "", *other, "", *crashed, *below, "", "Extension modules: a"]))
    assert last_lines(str(path), 20) == [error, *crashed]
