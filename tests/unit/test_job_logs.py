"""Logs by byte offset, with secrets struck out and the middle of what is too long dropped."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import NotFoundError
from phalanx.jobs import paths
from phalanx.jobs.attempt import logs
from phalanx.jobs.paths import logs as folder_of
from phalanx.launch.reports.logs import HANG


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder_of(tmp_path).mkdir()
    return tmp_path


def write(folder: Path, text: str | bytes, name: str = "workerlog.0") -> Path:
    path = folder_of(folder) / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_names_are_those_of_ranks_first_and_in_their_order(folder: Path) -> None:
    for name in ("workerlog.10", "workerlog.2", "node-0.log", "serverlog.1", "workerlog.x", "events.0.jsonl"):
        write(folder, "", name)
    assert logs.list_logs(folder) == ["2", "10", "server-1", "node-0"]


def test_a_log_is_read_on_from_where_the_last_piece_ended(folder: Path) -> None:
    write(folder, "one\ntwo\nthree\n" + "four " * 10)
    first = logs.read(folder, "0", limit=16)
    assert (first.text, first.next) == ("one\ntwo\nthree\n", 14)
    assert logs.read(folder, "0", first.next).text == "four " * 10
    assert logs.read(folder, "0", -5).text == "four "
    assert logs.read(folder, "0", 10**9).text == ""


def test_a_log_that_is_not_there_yet_is_empty(folder: Path) -> None:
    assert logs.read(folder, "3", 5) == logs.LogPart("", 5, False)


@pytest.mark.parametrize("name", ["../../etc/passwd", "node-0/../x", "", "-1", "٣", "worker-0"])
def test_names_that_are_no_logs_are_refused(folder: Path, name: str) -> None:
    with pytest.raises(NotFoundError, match="Logs are called 0, 1"):
        logs.read(folder, name)


def test_a_link_out_of_the_attempt_is_not_followed(folder: Path) -> None:
    (folder / "elsewhere").write_text("private")
    (folder_of(folder) / "workerlog.0").symlink_to(folder / "elsewhere")
    with pytest.raises(NotFoundError, match="a link out of the attempt's folder"):
        logs.read(folder, "0")
    (folder_of(folder) / "node-0").mkdir()
    write(folder, "mine", "node-0/workerlog.1")
    (folder_of(folder) / "workerlog.1").symlink_to("node-0/workerlog.1")
    assert logs.read(folder, "1").text == "mine"


def test_what_is_no_file_is_no_log(folder: Path) -> None:
    os.mkfifo(folder_of(folder) / "workerlog.0")  # opened, it would be waited for without end
    (folder_of(folder) / "workerlog.1").mkdir()
    assert [logs.read(folder, name).text for name in ("0", "1")] == ["", ""]


def test_secrets_are_struck_out_also_line_by_line(folder: Path) -> None:
    write(folder, "token hunter22 and\nBEGIN\nline-of-key\nEND\n")
    assert logs.read(folder, "0", secrets=["hunter22\n", "BEGIN\nline-of-key\nEND", "x"]).text == "token *** and\n***\n"
    write(folder, "only line-of-key here\n")
    assert logs.read(folder, "0", secrets=["BEGIN\nline-of-key\nEND"]).text == "only *** here\n"


def test_half_a_secret_at_the_end_of_a_growing_log_waits_for_the_rest(folder: Path) -> None:
    write(folder, "token hunt")
    growing = logs.read(folder, "0", secrets=["hunter22"])
    assert (growing.text, growing.next, growing.ended) == ("token ", 6, False)
    assert logs.read(folder, "0", secrets=["hunter22"], ended=True).text == "token hunt"
    write(folder, "token hunter22\n")
    assert logs.read(folder, "0", growing.next, secrets=["hunter22"]).text == "***\n"


def whole(folder: Path, limit: int, *secrets: str) -> str:
    """Read a finished log in pieces."""
    part = logs.LogPart("", 0, False)
    text = ""
    while not part.ended:
        part = logs.read(folder, "0", part.next, limit, secrets=secrets, ended=True)
        text += part.text
    return text


@given(st.text("ab\né世", max_size=80), st.sampled_from(["abab", "b\na\nb", "é世é世", "aaaab"]), st.integers(16, 40))
@settings(max_examples=150)
def test_pieces_of_any_size_give_the_whole_text_and_no_secret(
    tmp_path_factory: pytest.TempPathFactory, text: str, secret: str, limit: int
) -> None:
    folder = tmp_path_factory.mktemp("attempt")
    folder_of(folder).mkdir()
    write(folder, text)
    plain, hidden = whole(folder, limit), whole(folder, limit, secret)
    assert plain == text
    assert (hidden == text) == (secret not in text)
    assert secret not in hidden


def test_a_long_log_keeps_its_ends_and_its_offsets(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("CAP_BYTES", 2**20), ("HEAD_BYTES", 2**18), ("TAIL_BYTES", 2**18)):
        monkeypatch.setattr(logs, name, size)
    path = write(folder, b"".join(b"line %7d\n" % i for i in range(2**17)))
    before = path.stat().st_size
    logs.cap_sizes(folder)
    if path.stat().st_blocks * 512 > 2**20:
        pytest.skip("the file system of the test's folder frees no part of a file")
    assert path.stat().st_size == before
    assert logs.read(folder, "0", limit=13).text.startswith("line       0\n")
    hole = logs.read(folder, "0", 2**20)
    assert hole.text.startswith("[phalanx: ")
    assert "bytes were dropped here" in hole.text
    assert "\0" not in hole.text
    assert logs.read(folder, "0", -13).text == f"line {2**17 - 1:7}\n"
    text, offset = "", 0
    while (piece := logs.read(folder, "0", offset)).text:
        text, offset = text + piece.text, piece.next
    assert "\0" not in text
    assert text.count("dropped here") == 1


def test_harmless_noise_of_torchrun_is_annotated(folder: Path) -> None:
    write(folder, "done\nE1121 Error waiting on exit barrier. Elapsed: 0.3 s\n")
    assert "[phalanx: harmless after a success" in logs.read(folder, "0").text


def test_the_last_sign_is_the_newest_of_all_files(folder: Path) -> None:
    assert logs.last_sign(folder) == 0.0
    os.utime(write(folder, "a"), (5, 5))
    os.utime(write(folder, "a", "events.0.jsonl"), (9, 9))
    assert logs.last_sign(folder) == 9.0


def test_each_rank_is_heard_of_by_its_log_or_its_events(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    folder.mkdir()
    times = {"workerlog.0": 5, "events.worker.0.jsonl": 9, "workerlog.1": 6, "serverlog.0": 7, "node-0.log": 8}
    for name, time in times.items():
        (folder / name).touch()
        os.utime(folder / name, (time, time))
    assert logs.last_signs(tmp_path) == {"0": 9.0, "1": 6.0}


@pytest.mark.parametrize("kind", ["folder", "pipe", "link", "deep", "large", "surrogate", "list", "numbers", "text"])
def test_a_hang_report_that_a_script_put_there_is_none(folder: Path, tmp_path: Path, kind: str) -> None:
    path = paths.launcher_logs(folder, 0) / "hang.json"
    path.parent.mkdir(parents=True)
    report = json.dumps({"lines": ["rank 1 is elsewhere"]})
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        (tmp_path / "secret.json").write_text(report)
        path.symlink_to(tmp_path / "secret.json")
    else:
        texts = {
            "deep": "[" * 50_000,
            "large": json.dumps({"lines": ["x" * 2**17]}),
            "surrogate": '{"lines": ["\\ud800"]}',
            "list": "[1]",
            "numbers": '{"lines": 3}',
            "text": "{",
        }
        path.write_text(texts[kind])
    assert logs.read_report(folder, HANG) == ""


def test_a_hang_report_of_the_launcher_is_read(folder: Path) -> None:
    path = paths.launcher_logs(folder, 0) / "hang.json"
    path.parent.mkdir(parents=True)
    assert logs.read_report(folder, HANG) == ""
    path.write_text(json.dumps({"lines": ["rank 1 is elsewhere", "it waits"]}))
    assert logs.read_report(folder, HANG) == "rank 1 is elsewhere\nit waits"
