"""The commands of jobs over everything that is real: a controller, the local backend, a server and its client."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from phalanx.jobs.store import JobDatabase

pytestmark = pytest.mark.dist

VALUE = "hunter2-of-the-test"
PHALANX = (sys.executable, "-m", "phalanx")

SCRIPT = """
import contextlib, os, pathlib, sys
print("key is", os.environ.get("KEY"), "rank", os.environ["RANK"], flush=True)
seen = []
for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # of a process that has ended meanwhile
        seen.append(path.read_bytes())
print("seen by ps:", any(b"hunter2-of" in line for line in seen), flush=True)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    return folder


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "PHALANX_HOME": str(tmp_path / "home")}


Done = subprocess.CompletedProcess[str]


def phalanx(env: dict[str, str], work: Path, *words: str, text: str = "", code: int = 0) -> Done:
    done = subprocess.run([*PHALANX, *words], cwd=work, env=env, input=text, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def end_controllers(home: Path) -> None:
    """End the controllers that submitting started, which would stay for some seconds, and wait until they are gone.

    The lock of a controller is free before it closes the database, which deletes files.
    """
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if f"phalanx.jobs.control.controller\0{home}\0" in path.read_text(errors="replace"):
                process = os.pidfd_open(int(path.parent.name))
                signal.pidfd_send_signal(process, signal.SIGTERM)
                ended, _, _ = select.select([process], [], [], 20)
                os.close(process)
                assert ended, f"a controller did not end: {path.parent}"


def test_a_job_runs_without_a_server_and_its_secret_is_seen_nowhere(env, work, tmp_path):
    phalanx(env, work, "secret", "add", "KEY", text=VALUE)
    said = ["--name", "hello", "--launch", "env", "--secret", "KEY", "--", "python", "train.py", "3"]
    done = phalanx(env, work, "job", "run", *said, code=3)
    assert "key is *** rank 0" in done.stdout
    assert "seen by ps: False" in done.stdout
    home = tmp_path / "home"
    with JobDatabase(None, home) as store:
        (job,) = store.jobs.find()
    assert (job.failure.exit_code, job.attempt) == (3, 1)
    shown = phalanx(env, work, "job", "show", job.id, "--json").stdout
    assert "key is ***" in shown
    assert VALUE not in done.stdout + done.stderr + shown
    end_controllers(home)
    outside = [path for path in home.rglob("*") if path.is_file() and f"jobs/{job.id}/" not in str(path)]
    assert not [path for path in outside if VALUE.encode() in path.read_bytes()]


def test_the_same_commands_ask_a_server(env, work):
    token = phalanx(env, work, "token", "add", "test").stdout.strip()
    server = subprocess.Popen([*PHALANX, "serve", "--port", "0"], cwd=work, env=env, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        line = server.stderr.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert address, line + server.stderr.read()
        rest = threading.Thread(target=server.stderr.read)
        rest.start()
        far = {**env, "PHALANX_API": address[0], "PHALANX_TOKEN": token, "PHALANX_HOME": "/nonexistent"}
        done = phalanx(far, work, "job", "run", "--name", "far", "--launch", "env", "--", "python", "train.py", "0")
        assert "rank 0" in done.stdout
        (job,) = json.loads(phalanx(far, work, "job", "list", "--json").stdout)
        assert (job["state"], job["reason"]) == ("succeeded", "")
        phalanx({**far, "PHALANX_TOKEN": "phx_0_0"}, work, "job", "list", code=1)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(20)
    rest.join()
    server.stderr.close()
    assert server.returncode == 0
