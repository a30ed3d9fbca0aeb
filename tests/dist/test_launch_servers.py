"""The parameter-server roles: started, told apart, ended in order."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from launching import BIN, Launch, launch, launch_servers

pytestmark = pytest.mark.dist

ROLES = """
import json, os, signal, sys, time
role, rank = os.environ["TRAINING_ROLE"], os.environ["PHALANX_RANK"]
print(role, rank, "here", flush=True)
with open(f"{role}.{rank}.part", "w") as file:
    known = ("PADDLE", "PHALANX", "POD", "TRAINING", "CUDA")
    json.dump({k: v for k, v in os.environ.items() if k.startswith(known)}, file)
os.rename(f"{role}.{rank}.part", f"{role}.{rank}")
what = sys.argv[1] if len(sys.argv) > 1 else ""
if role == "TRAINER":
    while what.startswith("after ") and not os.path.exists(what.removeprefix("after ")):
        time.sleep(0.01)  # the launcher ends the other roles when the workers have ended
    if what == "server dies":
        signal.pause()
    if what == "worker fails" and rank == "1":
        raise RuntimeError("worker 1 fails")
    if what == "worker fails":
        signal.pause()
elif what == "server dies":
    os.kill(os.getpid(), signal.SIGKILL)
elif what != "server leaves":
    signal.pause()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "roles.py").write_text(ROLES)
    return tmp_path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    folder = tmp_path_factory.mktemp("ps")
    (folder / "roles.py").write_text(ROLES)
    flags = ("--server-num=1", "--worker-num=2", "--heter-worker-num", "1")
    return launch(folder, "--verbose", *flags, "roles.py", "after HETER_TRAINER.0")


def test_the_job_ends_well_and_in_the_known_order(run: Launch) -> None:
    assert run.code == 0, run.out
    finishing = run.out.index("] all workers exit, going to finish parameter server and heter_worker.")
    killed = run.out.index("] all parameter server are killed")
    assert finishing < killed


def test_the_mode_and_the_tables_are_printed(run: Launch) -> None:
    flags = "['--worker-num', '--server-num', '--heter-worker-num']"
    assert f"Run parameter-sever mode. pserver arguments:{flags}, cuda count:0" in run.out
    for words in ("Local server start 1 processes.", "Local worker start 2 processes."):
        assert f"] {words} First process distributed environment info (Only For Debug):" in run.out
    assert "launch train in" not in run.out
    assert (
        "] Please check servers, workers and heter_worker logs in log/workerlog.*, log/serverlog.* and log/heterlog.*"
        in run.out
    )


def test_the_tables_are_the_environment_of_the_first_of_each_role(run: Launch) -> None:
    tables = run.out.split("distributed environment info (Only For Debug):")[1:]
    for text, name in zip(tables, ("PSERVER.0", "TRAINER.0", "HETER_TRAINER.0"), strict=True):
        rows = dict(re.findall(r"^ +\| (\w+) +(\S*) \|$", text, re.MULTILINE))
        rows.pop("Distributed", None)
        environment = json.loads((run.cwd / name).read_text())
        assert rows == {key: environment[key] for key in rows}
        assert rows["PADDLE_GLOO_RENDEZVOUS"] == "3"
        assert len(rows) >= 10


def test_each_role_has_its_log_and_its_count(run: Launch) -> None:
    assert run.log("serverlog.0") == "PSERVER 0 here\n"
    assert run.log("heterlog.0") == "HETER_TRAINER 0 here\n"
    assert run.log("workerlog.1") == "TRAINER 1 here\n"
    server = json.loads((run.cwd / "PSERVER.0").read_text())
    assert (server["PHALANX_ROLE"], server["PHALANX_WORLD_SIZE"], server["PADDLE_TRAINERS_NUM"]) == ("SERVER", "1", "2")
    assert "PADDLE_TRAINER_ID" not in server
    assert run.log("endpoints.log").split()[3:5] == ["PADDLE_PSERVERS_IP_PORT_LIST:", server["PHALANX_ENDPOINT"]]


def test_a_dead_server_fails_the_job(folder: Path) -> None:
    done = launch_servers(folder, 1, 1, "roles.py", "server dies")
    assert done.code == 137
    assert "server 0 failed first" in done.out
    assert "log file: log/serverlog.0" in done.out


def test_a_failed_worker_ends_the_servers_and_fails_the_job(folder: Path) -> None:
    done = launch_servers(folder, 2, 2, "roles.py", "worker fails")
    assert done.code == 1
    assert "rank 1 raised RuntimeError: worker 1 fails" in done.out
    assert "all workers exit" not in done.out


def test_servers_may_end_by_themselves(folder: Path) -> None:
    done = launch_servers(folder, 1, 1, "roles.py", "server leaves")
    assert done.code == 0, done.out


def test_launch_ps_starts_the_same_job(folder: Path) -> None:
    program = (str(BIN / "python"), "-m", "phalanx.distributed.launch_ps")
    done = launch_servers(folder, 2, 2, "roles.py", program=program)
    assert done.code == 0
    assert done.log("serverlog.1") == "PSERVER 1 here\n"


RENDEZVOUS = """
import os, signal
from datetime import timedelta
import torch
import torch.distributed as dist

if os.environ["TRAINING_ROLE"] == "PSERVER":
    signal.pause()
rank, size = int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["PADDLE_TRAINERS_NUM"])
if os.environ["PADDLE_GLOO_RENDEZVOUS"] == "3":
    host, port = os.environ["PADDLE_GLOO_HTTP_ENDPOINT"].split(":")
    store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=30))
else:
    os.makedirs(os.environ["PADDLE_GLOO_FS_PATH"], exist_ok=True)
    store = dist.FileStore(os.path.join(os.environ["PADDLE_GLOO_FS_PATH"], "store"), size)
dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
x = torch.ones(1)
dist.all_reduce(x)
print("group of", x.item(), flush=True)
"""


@pytest.mark.parametrize("way", ["2", "3"])
def test_workers_form_a_group_over_the_endpoint_and_over_files(tmp_path: Path, way: str) -> None:
    (tmp_path / "group.py").write_text(RENDEZVOUS)
    environment = {"PADDLE_GLOO_RENDEZVOUS": way, "PADDLE_WITH_GLOO": "1"}
    done = launch_servers(tmp_path, 1, 2, "--verbose", "group.py", environment=environment)
    assert done.code == 0, done.out
    assert "group of 2.0" in done.log("workerlog.1")
    path = re.search(r"PADDLE_GLOO_FS_PATH +(\S+)", done.out)
    assert path is not None
    assert not Path(path[1]).exists()


def test_a_heter_worker_is_neither_worker_nor_server(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "from phalanx import fleet\n"
        "fleet.init()\n"
        "if fleet.is_server():\n"
        "    fleet.init_server()\n"
        "    fleet.run_server()\n"
        "elif fleet.is_worker():\n"
        "    fleet.init_worker()\n"
        "    fleet.stop_worker()\n"
        "else:\n"
        "    print('a role of its own', fleet.worker_num(), fleet.server_num(), flush=True)\n"
    )
    done = launch_servers(tmp_path, 1, 1, "--heter-worker-num", "1", "train.py")
    assert done.code == 0, done.out
    assert "a role of its own 1 1" in done.log("heterlog.0")
