"""What is made of a launcher's end, of preparations that fail, and of the files between nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import BackendError
from phalanx.jobs import paths
from phalanx.jobs.attempt import files as attempt_files
from phalanx.jobs.attempt.files import DETAIL_BYTES, AttemptSpec, ExitRecord
from phalanx.jobs.attempt.launch_command import Rendezvous
from phalanx.jobs.backend import Submission
from phalanx.jobs.models import Cause
from phalanx.jobs.node import setup as node_setup
from phalanx.jobs.node.exit_reason import failure
from phalanx.jobs.node.setup import NodeSetup
from phalanx.jobs.spec.training_job import TrainingJob

TORCHRUN = """
Traceback (most recent call last):
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-21_19:00:02
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 7)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_19:00:01
  host      : a
  rank      : 3 (local_rank: 1)
  exitcode  : -9 (pid: 8)
============================================================
"""


def spec(**said: Any) -> TrainingJob:
    return TrainingJob.model_validate({"name": "j", "command": "python train.py", **said})


def read(tmp_path: Path, said: str, code: int, **more: Any) -> ExitRecord:
    (tmp_path / "said").write_text(said)
    return failure(spec(**more), 0, code, output=tmp_path / "said", logs=tmp_path)


def test_torchruns_root_cause_is_the_rank(tmp_path: Path) -> None:
    (tmp_path / "workerlog.3").write_text("step 1\nstep 2\n")
    end = read(tmp_path, TORCHRUN, 1, launch="torchrun")
    assert (end.rank, end.exit_code, end.detail) == (3, -9, "step 1\nstep 2")
    assert end.message == "rank 3 was ended by signal 9 (SIGKILL)"
    end = read(tmp_path, "torchrun: no such flag", 2, launch="torchrun")
    assert (end.rank, end.message, end.detail) == (None, "torchrun ended with exit code 2", "torchrun: no such flag")


def test_what_our_launcher_recorded_is_the_cause(tmp_path: Path) -> None:
    first = {"title": "rank 1", "role": "worker", "rank": 1, "code": 1, "traceback": "T" * 20_000, "last_lines": []}
    (tmp_path / "ended.json").write_text(json.dumps({"code": 1, "first": first, "said": "raised ValueError: x"}))
    end = read(tmp_path, "", 1)
    assert (end.message, end.rank, end.cause) == ("rank 1 raised ValueError: x", 1, Cause.USER_CODE)
    assert len(end.detail) == DETAIL_BYTES
    hung = {"code": 124, "first": {**first, "kind": "hang"}, "said": "hung: rank 1 is at train.py:9"}
    (tmp_path / "ended.json").write_text(json.dumps(hung))
    end = read(tmp_path, "", 124)
    assert (end.message, end.cause) == ("rank 1 hung: rank 1 is at train.py:9", Cause.HANG)
    (tmp_path / "ended.json").write_text(json.dumps({"code": 1, "error": "PeerLostError", "message": "host b is gone"}))
    assert read(tmp_path, "", 1).cause is Cause.NODE_FAILURE
    (tmp_path / "ended.json").write_text(json.dumps({"code": 1, "error": "LaunchError", "message": "port in use"}))
    assert read(tmp_path, "", 1) == ExitRecord("failed", Cause.SETUP, "port in use", None, 1)


def test_a_launcher_that_left_no_word_is_read_by_its_code(tmp_path: Path) -> None:
    assert read(tmp_path, "no such flag", 2).cause is Cause.SETUP
    killed = read(tmp_path, "", -9)
    assert (killed.cause, killed.message) == (Cause.USER_CODE, "the launcher was ended by signal 9 (SIGKILL)")


def test_an_error_of_a_library_while_preparing_is_a_failure_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug elsewhere")

    monkeypatch.setattr(node_setup, "check_out_code", broken)
    order = AttemptSpec("j-1", 1, spec(), tmp_path, tmp_path / "checkpoints")
    setup = NodeSetup(tmp_path, order, Rendezvous(0, ("127.0.0.1",)), {}, in_pod=False)
    setup.run()
    assert setup.prepared is None
    assert str(setup.error) == "a bug elsewhere"


def test_a_node_that_waits_for_the_first_gives_up_with_it(tmp_path: Path) -> None:
    attempt_files.write_exit_record(tmp_path, 0, ExitRecord("failed", Cause.SETUP, "no code"))
    order = AttemptSpec("j-1", 1, spec(), tmp_path, tmp_path / "checkpoints")
    setup = NodeSetup(tmp_path, order, Rendezvous(1, ("127.0.0.1", "127.0.0.2")), {}, in_pod=False)
    setup.run()
    assert "node 0 ended before it had prepared the code" in str(setup.error)


def test_an_exit_record_needs_no_space_that_was_not_taken_before(tmp_path: Path) -> None:
    end = ExitRecord("failed", Cause.USER_CODE, "no space left", detail="\u4e2d" * DETAIL_BYTES)
    attempt_files.reserve_exit_record(tmp_path, 0)
    (room,) = tmp_path.iterdir()
    before = room.stat()
    attempt_files.write_exit_record(tmp_path, 0, end)
    after = paths.exit_record(tmp_path, 0).stat()
    assert (after.st_ino, after.st_blocks) <= (before.st_ino, before.st_blocks)
    assert attempt_files.read_exit_record(tmp_path, 0) == end
    assert list(tmp_path.iterdir()) == [paths.exit_record(tmp_path, 0)]


def test_what_a_job_wrote_over_its_record_is_a_failure_in_words(tmp_path: Path) -> None:
    paths.exit_record(tmp_path, 0).write_bytes(b"\xff\xfe")
    paths.heartbeat(tmp_path, 0).write_bytes(b"\xff")
    end = attempt_files.read_exit_record(tmp_path, 0)
    assert end is not None
    assert end.message.startswith("the exit record of node 0 cannot be read")
    attempt_files.write_heartbeat(tmp_path, 0, "running")
    assert attempt_files.read_activity(tmp_path, 0) == "running"


def test_orders_and_ends_are_read_as_they_were_written(tmp_path: Path) -> None:
    folder = tmp_path / "jobs" / "j-1" / "attempt-2"
    submission = Submission("j-1", 2, spec(checkpoint={"dir": "kept"}), folder, {"TOKEN": "hush"})
    assert "hush" not in attempt_files.write_spec(submission).read_text()
    order = attempt_files.read_spec(folder)
    assert (order.home, order.checkpoint) == (tmp_path, tmp_path / "jobs" / "j-1" / "kept")
    assert order.spec == submission.spec
    end = ExitRecord("failed", Cause.OOM, "m", 3, -9, "d", 1.0, 2.0)
    attempt_files.write_exit_record(folder, 0, end)
    assert attempt_files.read_exit_record(folder, 0) == end
    assert attempt_files.read_exit_record(folder, 1) is None
    assert attempt_files.read_activity(folder, 0) == ""
    attempt_files.write_heartbeat(folder, 0, "preparing code")
    attempt_files.write_heartbeat(folder, 0, "preparing code")
    assert attempt_files.read_activity(folder, 0) == "preparing code"
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
    paths.exit_record(folder, 1).write_text("{}")
    (folder / "attempt.json").write_text("{}")
    with pytest.raises(BackendError, match="does not say what to run"):
        attempt_files.read_spec(folder)
