"""Log folders that are full, deleted or mounts: how the training ends decides the exit code, not its logs."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from launching import RUN, Launch, launch

pytestmark = pytest.mark.fault

TRAIN = """
import json, os, shutil, sys, time
rank, what = os.environ["RANK"], sys.argv[1]
if what == "deletes" and rank == "0":
    shutil.rmtree("log")
if what == "fills" and rank == "0":
    with open("log/filler", "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)): pass
        except OSError:
            pass
    # Until the launcher has seen it.
    while "is full" not in open("screen").read():
        print("a line that may be lost", flush=True)
        time.sleep(0.05)
    print("x" * 8192)
    os.remove("log/filler")
    print("a line after that")
open(f"trained.{rank}", "w").write("x")
"""


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A folder with a file system of 256 KiB in `log`."""
    log = tmp_path / "log"
    log.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", log], capture_output=True).returncode:
        pytest.skip("a file system of its own can be mounted by root only")
    yield tmp_path
    subprocess.run(["umount", log], check=True)


def train(folder: Path, what: str, *flags: str, screen: str = "") -> Launch:
    (folder / "train.py").write_text(TRAIN)
    program = ("sh", "-c", f'exec "$@" > {screen}', "sh", *RUN) if screen else RUN
    return launch(folder, "-n", "2", *flags, "train.py", what, program=program)


def test_a_log_folder_deleted_while_the_job_runs_does_not_fail_it(tmp_path: Path) -> None:
    done = train(tmp_path, "deletes")
    assert done.code == 0, done.out + done.err
    assert json.loads(done.log("ended.json")) == {"code": 0}


def test_a_log_folder_that_fills_up_loses_lines_and_not_the_training(small: Path) -> None:
    (small / "screen").write_text("")
    done = train(small, "fills", screen="screen")
    screen = (small / "screen").read_text()
    assert done.code == 0, screen + done.err
    assert re.search(r"the file system of \S+/log is full, 4,096 bytes are needed and \d+ are free", screen)
    assert {path.name for path in small.glob("trained.*")} == {"trained.0", "trained.1"}
    assert re.search(r"\d+ bytes of output are missing here: .* was full\n+a line after that", done.log("workerlog.0"))


def test_a_log_folder_without_room_is_refused_before_the_start(small: Path) -> None:
    (small / "log" / "filler").write_bytes(bytes(250 << 10))
    done = train(small, "trains")
    assert done.code == 2
    assert re.search(
        r"--log-dir log cannot be written to \(the file system of log is full, 16,384 bytes are needed and "
        r"[\d,]+ are free\)\. Choose another folder\.",
        done.err,
    )
    assert not list(small.glob("trained.*"))


def test_a_volume_in_the_log_folder_stays_and_its_files_move_inside_it(small: Path) -> None:
    """As when `log/servers` is a volume for the state of servers."""
    (small / "log" / "0").write_text("rows of the run before")
    (small / "logs").mkdir()
    (small / "logs" / "servers").mkdir()
    subprocess.run(["mount", "--bind", small / "log", small / "logs" / "servers"], check=True)
    try:
        done = train(small, "trains", "--log-dir", "logs")
        assert done.code == 0, done.out + done.err
        assert (small / "logs/servers/previous/0").read_text() == "rows of the run before"
        assert not (small / "logs/servers/0").exists()
    finally:
        subprocess.run(["umount", small / "logs" / "servers"], check=True)


def test_without_a_run_time_folder_the_job_runs_unlisted(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trained')")
    done = launch(tmp_path, "train.py", environment={"XDG_RUNTIME_DIR": "/dev/null"})
    assert done.code == 0, done.err
    assert "`phalanx ps` will not show this job: /dev/null/phalanx cannot be made (Not a directory)" in done.out
    assert "trained" in done.out


def test_a_screen_that_takes_nothing_does_not_fail_the_job(tmp_path: Path) -> None:
    done = train(tmp_path, "trains", screen="/dev/full")
    assert done.code == 0, done.err
    assert {path.name for path in tmp_path.glob("trained.*")} == {"trained.0", "trained.1"}
