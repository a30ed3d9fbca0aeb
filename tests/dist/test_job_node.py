"""What runs on a node, with real launchers and ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from job_nodes import DDP, SERVERS, ends, log, start_node, submission
from phalanx.jobs.attempt import files as attempt_files
from phalanx.jobs.attempt import usage
from phalanx.jobs.attempt.launch_command import loopback_hosts
from phalanx.jobs.backends.local import NODE
from phalanx.jobs.models import Cause

pytestmark = pytest.mark.dist

TELLS = """
import json, os, sys
names = "RANK WORLD_SIZE MASTER_PORT PHALANX_CHECKPOINT_DIR TOKEN OTHER COLOUR PHALANX_SECRET_KEY PHALANX_TOKEN"
print("RESULT", json.dumps({name: os.environ.get(name) for name in names.split()}), flush=True)
"""


def test_two_nodes_of_two_processes_train_together(tmp_path: Path) -> None:
    made = submission(tmp_path, DDP, resources={"nodes": 2, "procs_per_node": 2})
    found = ends(made, [start_node(made, 0), start_node(made, 1)])
    assert [end.outcome for end in found] == ["succeeded", "succeeded"]
    assert {log(made, f"workerlog.{rank}").split("RESULT ")[1].strip() for rank in range(4)} == {
        f"{rank} 4 4" for rank in range(4)
    }
    assert attempt_files.read_activity(made.folder, 0) == "running"


def test_torchrun_gives_every_rank_a_log_and_names_who_failed(tmp_path: Path) -> None:
    script = DDP + "import os\nif os.environ['RANK'] == '1':\n    raise ValueError('bad row')\n"
    made = submission(tmp_path, script, launch="torchrun", resources={"procs_per_node": 2})
    (end,) = ends(made, [start_node(made, 0)])
    assert "RESULT 0 2 2" in log(made, "workerlog.0")
    assert (end.outcome, end.cause, end.rank, end.exit_code) == ("failed", Cause.USER_CODE, 1, 1)
    assert end.message == "rank 1 ended with exit code 1"
    assert end.detail.endswith("ValueError: bad row")


def test_one_process_a_node_finds_counts_of_nodes_and_its_secrets(tmp_path: Path) -> None:
    said = {"launch": "env", "resources": {"nodes": 2}, "env": {"COLOUR": "blue"}, "secrets": ("TOKEN",)}
    made = submission(tmp_path, TELLS, values={"TOKEN": "x", "OTHER": "y"}, **said)
    nodes = [start_node(made, node, PHALANX_SECRET_KEY="key", PHALANX_TOKEN="t") for node in range(2)]
    assert [end.outcome for end in ends(made, nodes)] == ["succeeded", "succeeded"]
    for node in range(2):
        told = json.loads(log(made, f"workerlog.{node}").split("RESULT ")[1])
        assert (told["RANK"], told["WORLD_SIZE"], told["MASTER_PORT"]) == (str(node), "2", "29400")
        assert (told["TOKEN"], told["OTHER"], told["COLOUR"], told["PHALANX_SECRET_KEY"]) == ("x", None, "blue", None)
        assert told["PHALANX_TOKEN"] is None
        assert told["PHALANX_CHECKPOINT_DIR"] == str(tmp_path / "jobs" / "job-1" / "checkpoints")
    written = [path for path in made.folder.rglob("*") if path.is_file() and "workerlog" not in path.name]
    assert not [path for path in written if '"x"' in path.read_text()]


def test_who_fails_is_recorded_and_the_other_node_ends_too(tmp_path: Path) -> None:
    script = "import os, time\nif os.environ['RANK'] == '1':\n    raise ValueError('bad row')\ntime.sleep(60)\n"
    made = submission(tmp_path, script, launch="env", resources={"nodes": 2})
    waits, fails = ends(made, [start_node(made, 0), start_node(made, 1)])
    assert (fails.outcome, fails.cause, fails.rank, fails.exit_code) == ("failed", Cause.USER_CODE, 1, 1)
    assert fails.detail.endswith("ValueError: bad row")
    assert (waits.outcome, waits.message) == ("stopped", "ended with node 1, which failed")


def test_an_exception_of_a_rank_is_told_with_its_traceback(tmp_path: Path) -> None:
    made = submission(tmp_path, "def f():\n    raise KeyError('row')\nf()\n")
    (end,) = ends(made, [start_node(made, 0)])
    assert (end.rank, end.exit_code, end.message) == (0, 1, "rank 0 raised KeyError: 'row'")
    assert "in f\n" in end.detail


def test_a_signal_reaches_ranks_which_save_within_the_grace(tmp_path: Path) -> None:
    script = (
        "import signal, sys, time\n"
        "def save(*_):\n    print('saved', flush=True)\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\nprint('up', flush=True)\ntime.sleep(60)\n"
    )
    made = submission(tmp_path, script)
    node = start_node(made, 0)
    _wait_for(made.folder / "logs" / "workerlog.0", "up")
    node.send_signal(signal.SIGTERM)
    (end,) = ends(made, [node])
    assert (end.outcome, end.exit_code, end.message) == ("stopped", 0, "asked to end by SIGTERM")
    assert "saved" in log(made, "workerlog.0")
    assert node.returncode == 143


@pytest.mark.parametrize("asked", [False, True])
def test_who_ends_in_no_time_is_killed(tmp_path: Path, asked: bool) -> None:
    script = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(60)\n"
    )
    limit = {} if asked else {"max_runtime": "1s"}
    made = submission(tmp_path, script, launch="env", grace=0.1, **limit)
    node = start_node(made, 0)
    if asked:
        _wait_for(made.folder / "logs" / "workerlog.0", "up")
        node.send_signal(signal.SIGTERM)
    (end,) = ends(made, [node])
    if asked:
        assert (end.outcome, end.exit_code) == ("stopped", -9)
    else:
        assert (end.cause, end.message) == (Cause.TIMEOUT, "still running after max_runtime, 1 s")


def test_pods_share_no_folder_and_tell_the_cluster_what_they_print_and_how_they_ended(tmp_path: Path) -> None:
    hosts = ",".join(loopback_hosts("pods", 1, 2))
    nodes, reports = [], []
    for number, role in enumerate(("worker", "server")):
        made = submission(tmp_path / role, SERVERS, servers={"count": 1})
        attempt_files.write_spec(made)
        secrets, report = (tmp_path / f"{role}.{name}" for name in ("secrets", "report"))
        secrets.write_text(json.dumps({"PHALANX_JOB_SECRET": "ab" * 32}))
        command = [*NODE, str(made.folder), "--pod", "--node", "JOB_COMPLETION_INDEX", "--first-node", str(number)]
        command += ["--hosts", hosts, "--secrets-file", str(secrets), "--report", str(report)]
        environment = {**os.environ, "JOB_COMPLETION_INDEX": "0", "PHALANX_LANG": "en"}
        nodes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        reports.append(report)
    said = [node.communicate(timeout=60)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert "RESULT 0 1" in said[0]
    assert [attempt_files.parse_exit_record(report.read_text()).outcome for report in reports] == [
        "succeeded",
        "succeeded",
    ]


def test_what_cannot_be_prepared_or_started_is_a_failure_of_the_set_up(tmp_path: Path) -> None:
    made = submission(tmp_path / "a", "", command="no-such-program", launch="env")
    (end,) = ends(made, [start_node(made, 0)])
    assert (end.outcome, end.cause) == ("failed", Cause.SETUP)
    assert "'no-such-program' could not be started" in end.message
    made = submission(tmp_path / "b", "", code={"path": ".", "subdir": "not/there"})
    (end,) = ends(made, [start_node(made, 0)])
    assert (end.cause, end.message) == (
        Cause.SETUP,
        "code has no folder not/there, which code.subdir names. Correct it.",
    )
    made = submission(tmp_path / "c", "", command="python missing.py")
    (end,) = ends(made, [start_node(made, 0)])
    assert (end.cause, "missing.py" in end.message + end.detail) == (Cause.SETUP, True)


USES = """
import os, pathlib, signal
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
held = b"x" * (200 << 20)
home = pathlib.Path(os.environ["HOME_OF_TEST"])
(home / "new").write_text(str(os.getpid()))
(home / "new").rename(home / "pid")
while True:
    pass
"""
DRIVER = """#!/bin/sh
case "$1" in
*apps*) if [ -e "$HOME_OF_TEST/pid" ]; then echo "$(cat "$HOME_OF_TEST/pid"), GPU-a, 1024"; fi;;
*) printf 'GPU-a, 50\nGPU-b, 90\n';;
esac
"""


@pytest.mark.parametrize(
    ("driver", "cards"), [(DRIVER, (0.5, 1 << 30)), ("#!/bin/sh\nexit 9\n", (None, None))], ids=["answers", "fails"]
)
def test_what_processes_use_is_told(tmp_path: Path, driver: str, cards: tuple[float | None, int | None]) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(driver)
    tool.chmod(0o755)
    made = submission(tmp_path, USES, launch="env")
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    node = start_node(made, 0, PATH=path, HOME_OF_TEST=str(tmp_path))
    deadline = time.monotonic() + 30
    while True:
        found = usage.read(made.folder, 0, -1).samples
        if found and found[0].memory >= 200 << 20 and (found[0].gpu, found[0].gpu_memory) == cards:
            break
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    node.send_signal(signal.SIGTERM)
    (end,) = ends(made, [node])
    assert (end.outcome, end.exit_code) == ("stopped", 0)
    (last,) = found
    assert last.memory <= last.peak < 400 << 20
    assert 0 < last.cpu < 1.5
    assert abs(last.time - end.ended) < 30


def _wait_for(path: Path, text: str) -> None:
    deadline = time.monotonic() + 30
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < deadline, f"{text!r} did not come in {path}"
        time.sleep(0.01)
