"""With --max-restarts a server or a worker of a parameter-server job is started again alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from launching import launch_servers

pytestmark = pytest.mark.fault

JOB = '''
import json, os, signal, socket, sys, time

what, role, rank = sys.argv[1], os.environ["TRAINING_ROLE"], os.environ["PHALANX_RANK"]
attempt = int(os.environ["PHALANX_ATTEMPT"])
with open(f"{role}.{rank}.{attempt}", "w") as file:
    json.dump({k: v for k, v in os.environ.items() if k.startswith(("PHALANX_", "TORCHELASTIC_"))}, file)

def serve():
    """Answer each line with the number of this attempt; "die" is not answered."""
    listening = socket.socket(fileno=int(os.environ["PHALANX_ENDPOINT_FD"]))
    listening.listen()
    print("serving at", listening.getsockname()[1], flush=True)
    while True:
        connection, _ = listening.accept()
        with connection, connection.makefile("rw") as lines:
            for line in lines:
                if line == "die\\n":
                    os.kill(os.getpid(), signal.SIGKILL)
                lines.write(f"{attempt}\\n")
                lines.flush()

def connect():
    host, port = os.environ["PHALANX_SERVER_ENDPOINTS"].split(":")
    while True:  # Refused only until the server first listens.
        try:
            return socket.create_connection((host, int(port)))
        except ConnectionRefusedError:
            time.sleep(0.01)

def ask(word):
    with connect() as connection, connection.makefile("rw") as lines:
        lines.write(word + "\\n")
        lines.flush()
        try:
            return lines.readline().strip()
        except ConnectionResetError:
            return ""

if role == "PSERVER":
    serve()
said = [ask("hello")]
if what in ("server dies", "server dies often"):
    for _ in range(1 if what == "server dies" else 3):
        said.append(ask("die"))
        said.append(ask("hello"))  # Waits in the queue of the socket that outlived the server.
if what == "worker dies" and rank == "1" and attempt == 0:
    os.kill(os.getpid(), signal.SIGKILL)
if what == "worker raises":
    raise ValueError(f"bad data at attempt {attempt}")
print("worker", rank, "attempt", attempt, "heard", said, flush=True)
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text(JOB)
    return tmp_path


def environment(folder: Path, process: str) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / process).read_text())
    return found


def test_a_killed_server_comes_back_under_its_address_while_workers_go_on(folder: Path) -> None:
    done = launch_servers(folder, 1, 2, "--max-restarts", "4", "job.py", "server dies")
    assert done.code == 0, done.out + done.err
    heard = [re.search(r"attempt 0 heard \['(\d)', '', '(\d)'\]", done.log(f"workerlog.{rank}")) for rank in range(2)]
    assert all(heard), done.log("workerlog.0") + done.log("workerlog.1")
    assert sorted(int(last) for match in heard if match for last in match.groups()[1:])[-1] == 2
    served = re.findall(r"serving at (\d+)", done.log("serverlog.0"))
    assert len(served) == 3
    assert len(set(served)) == 1
    assert re.search(
        r"WARNING .*server 0 ended by signal 9 \(SIGKILL\).*"
        r"Starting it again, the others keep running; restarts left: 3",
        done.out,
    )
    first, again = (environment(folder, f"PSERVER.0.{attempt}") for attempt in (0, 1))
    assert first["PHALANX_SERVER_DIR"] == again["PHALANX_SERVER_DIR"] == str(folder / "log" / "servers" / "0")
    assert again["TORCHELASTIC_RESTART_COUNT"] == "1"
    assert len(first["PHALANX_JOB_SECRET"]) == 64
    assert first["PHALANX_JOB_SECRET"] == again["PHALANX_JOB_SECRET"]
    said = [done.out, done.err, *(p.read_text() for p in (folder / "log").rglob("*") if p.is_file())]
    assert not any(first["PHALANX_JOB_SECRET"] in text for text in said)
    assert environment(folder, "TRAINER.0.0")["PHALANX_SERVER_RETRY_S"] == "60"


def test_a_killed_worker_is_started_again_alone(folder: Path) -> None:
    done = launch_servers(folder, 1, 2, "--max-restarts", "1", "job.py", "worker dies")
    assert done.code == 0, done.out + done.err
    assert done.log("workerlog.0") == "worker 0 attempt 0 heard ['0']\n"
    assert done.log("workerlog.1") == "worker 1 attempt 1 heard ['0']\n"
    assert done.log("serverlog.0").count("serving") == 1


def test_when_restarts_run_out_the_job_fails_with_the_usual_report(folder: Path) -> None:
    done = launch_servers(folder, 1, 1, "--max-restarts", "2", "job.py", "server dies often")
    assert done.code == 137
    assert "server 0 failed first" in done.out
    done = launch_servers(folder, 1, 1, "--max-restarts", "2", "job.py", "worker raises")
    assert done.code == 1
    assert "rank 0 raised ValueError: bad data at attempt 2" in done.out
    assert "ValueError: bad data at attempt 1. Starting it again" in done.out


def test_without_restarts_servers_keep_nothing_and_workers_do_not_wait(folder: Path) -> None:
    # Its worker asks again and again: one that asked once could end before its server's end is seen.
    done = launch_servers(folder, 1, 1, "job.py", "server dies often")
    assert done.code == 137
    assert "PHALANX_SERVER_DIR" not in environment(folder, "PSERVER.0.0")
    assert environment(folder, "TRAINER.0.0")["PHALANX_SERVER_RETRY_S"] == "0"
    done = launch_servers(folder, 1, 1, "--server-dir", "kept", "job.py", "nothing")
    assert done.code == 0
    assert environment(folder, "PSERVER.0.0")["PHALANX_SERVER_DIR"] == str(folder / "kept" / "0")


GROUP = """
import os, signal
import phalanx as px
import torch.distributed as dist

role = px.cluster.Role.detect()
if role.is_server:
    signal.pause()
ctx = px.init()
if ctx.rank == 1 and role.attempt == 0:
    os.kill(os.getpid(), signal.SIGKILL)
print("rank", ctx.rank, "of", ctx.world_size, "in a group:", dist.is_initialized(), flush=True)
"""


def test_a_worker_that_comes_back_does_not_wait_for_a_group_it_cannot_join(tmp_path: Path) -> None:
    (tmp_path / "group.py").write_text(GROUP)
    done = launch_servers(tmp_path, 1, 2, "--max-restarts", "1", "group.py")
    assert done.code == 0, done.out + done.err
    assert "rank 0 of 2 in a group: True" in done.log("workerlog.0")
    assert "rank 1 of 2 in a group: False" in done.log("workerlog.1")
    assert "worker 1 was started again alone" in done.out
