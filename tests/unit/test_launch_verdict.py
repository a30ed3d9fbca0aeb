"""Who failed first, and how that is told."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.errors import PeerLostError
from phalanx.launch.process import entry
from phalanx.launch.reports import report
from phalanx.launch.reports.root_cause import ProcessExit, first_failure


def ending(rank: int, code: int, time: float, **more: Any) -> ProcessExit:
    values = {"title": f"rank {rank}", "role": "worker", "rank": rank, "host": "vm", "pid": 100 + rank}
    return ProcessExit(**{**values, "code": code, "time": time, "log_file": f"log/workerlog.{rank}", **more})


GLOO = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:1"


@pytest.mark.parametrize(
    ("endings", "rank"),
    [
        # The survivor's connection error is seen first.
        ([ending(0, 1, 1.0, kind="peer", error=GLOO), ending(1, -9, 1.1)], 1),
        # Its own exception is earlier than the other's, and both are earlier than a signal we sent.
        ([ending(0, 1, 2.0, kind="exception"), ending(1, 1, 1.0, kind="exception")], 1),
        ([ending(0, -15, 0.5, stopped_by_us=True), ending(1, 3, 1.0)], 1),
        # A thread that aborts because a peer is gone does not hide the peer's exception.
        ([ending(0, -6, 1.1), ending(1, 1, 1.0, kind="exception")], 1),
        ([ending(0, 1, 0.9, kind="exception"), ending(1, -11, 1.0)], 1),
        # Left early, and seen to be gone later than its peer's error.
        ([ending(0, 1, 1.0, kind="peer"), ending(1, 0, 1.2)], 1),
        ([ending(0, 1, 1.0, kind="peer"), ending(1, 0, 1.2, stopped_by_us=True)], 0),
        ([ending(0, 0, 1.0), ending(1, 0, 1.0)], None),
    ],
)
def test_the_first_failure_is_the_cause_and_not_the_survivor(endings: list[ProcessExit], rank: int | None) -> None:
    found = first_failure(endings)
    assert (found.rank if found else None) == rank


def test_the_exit_code_is_that_of_the_first_failure_and_never_zero() -> None:
    assert ending(0, -9, 1.0).exit_code == 137
    assert ending(0, 3, 1.0).exit_code == 3
    assert ending(0, 0, 1.0).exit_code == 1


def test_an_ending_travels_between_hosts() -> None:
    first = ending(0, 1, 1.0, last_lines=("a", "b"))
    assert ProcessExit.from_json(first.to_json()) == first


def test_the_report_names_rank_signal_and_log() -> None:
    text = report.render(ending(1, -9, 1.0, last_lines=("step 3",)), [ending(0, 1, 1.1, error=GLOO)])
    lines = text.splitlines()
    assert "rank 1 failed first" in lines[0]
    assert lines[1].startswith("rank 1 ended by signal 9 (SIGKILL): killed from outside")
    assert "    rank 0: raised RuntimeError: [pair.cc:553]" in text
    assert "    step 3" in lines
    assert lines[-2] == "log file: log/workerlog.1"
    assert lines[-1] == "=" * 88


def test_the_report_ends_with_the_traceback_of_the_first() -> None:
    text = report.render(ending(1, 1, 1.0, error="ValueError: bad", traceback="Traceback ...\nValueError: bad\n"), [])
    assert "rank 1 raised ValueError: bad\n" in text
    assert text.index("Traceback") > text.index("on vm, pid 101")


def test_the_report_speaks_chinese(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_LANG", "zh")
    text = report.render(ending(1, 0, 1.0), [])
    assert "rank 1 最先失败" in text
    assert len(text.splitlines()[0].encode("gbk")) == 88
    assert "提前以退出码 0 结束" in text


def test_early_end_is_told() -> None:
    assert report.describe_exit(ending(1, 0, 1.0)) == "ended early with exit code 0, while others still waited for it"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("[x/pair.cc:553] Connection closed by peer [127.0.0.1]:43"), "peer"),
        (RuntimeError("[x/unbound_buffer.cc:81] Timed out waiting 8000ms for recv operation"), "peer"),
        (ConnectionResetError("reset"), "peer"),
        (PeerLostError("rank 1 did not come"), "peer"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "exception"),
        (ValueError("Connection closed by peer"), "exception"),
    ],
)
def test_errors_about_a_peer_are_told_from_the_scripts_own(error: Exception, kind: str) -> None:
    assert entry.error_kind(error) == kind


def test_an_error_raised_from_a_peers_end_is_about_the_peer() -> None:
    error = ValueError("sync failed")
    error.__cause__ = ConnectionResetError("reset")
    assert entry.error_kind(error) == "peer"


def test_of_an_early_end_the_report_says_in_full_what_it_was_missing_from() -> None:
    said = f"PeerLostError: rank 0 ({'p' * 100}) waited for rank 1, which did not come to 'px.save'"
    text = report.render(ending(1, 0, 1.0), [ending(0, 1, 1.1, error=said, kind="peer")])
    assert "which did not come to 'px.save'" in " ".join(text.split())
