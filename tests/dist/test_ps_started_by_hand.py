"""A parameter-server job whose processes are started by hand, on one host, from Fleet's variables alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launching import SPARSE_MODEL, free_ports, launch_servers_warm
from phalanx import fleet
from ranks import FLEET_ONLY, Outcome, run_ranks

pytestmark = pytest.mark.dist

SCRIPT = (
    SPARSE_MODEL
    + """
import os, sys
what = sys.argv[1]
strategy = fleet.DistributedStrategy(a_sync=False)
fleet.init(strategy=strategy)
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
    print("server ends", flush=True)
    sys.exit()
fleet.init_worker()
if what == "fails":
    raise ValueError("no data")
if what == "trains":
    model = Model()
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    model = fleet.distributed_model(model)
    for step in range(3):
        F.mse_loss(model(torch.tensor([[1, 2]])), torch.ones(1, 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
if fleet.worker_index() == 0 or what != "trains":  # the other worker forgets to leave
    fleet.stop_worker()
print("worker ends", flush=True)
"""
)


def fleet_variables(folder: Path) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Return the variables that a server and two workers share, and those that each has."""
    server, *workers = (f"127.0.0.1:{port}" for port in free_ports(3))
    shared = {
        "PADDLE_PSERVERS_IP_PORT_LIST": server,
        "PADDLE_TRAINER_ENDPOINTS": ",".join(workers),
        "PADDLE_TRAINERS_NUM": "2",
        "XDG_RUNTIME_DIR": str(folder),
    }
    own = [{"TRAINING_ROLE": "PSERVER", "POD_IP": "127.0.0.1", "PADDLE_PORT": server.rpartition(":")[2]}]
    return shared, own + [{"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": str(rank)} for rank in range(2)]


def start(folder: Path, what: str) -> list[tuple[int, str]]:
    """Start a server and two workers, and return the exit code and the output of each."""
    shared, own = fleet_variables(folder)
    (folder / "train.py").write_text(SCRIPT)
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, "train.py", what]
    started = [
        subprocess.Popen(command, cwd=folder, env={**os.environ, **shared, **variables}, **piped) for variables in own
    ]
    try:
        texts = [process.communicate(timeout=60)[0] for process in reversed(started)]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, text) for process, text in zip(started, reversed(texts), strict=True)]


def test_the_job_ends_well_without_a_secret_of_the_user_and_where_a_worker_forgets_to_leave(tmp_path: Path) -> None:
    for code, text in start(tmp_path, "trains"):
        assert code == 0, text
        assert "ends\n" in text


def test_a_worker_that_fails_before_its_first_table_is_lost_and_nobody_waits(tmp_path: Path) -> None:
    server, *workers = start(tmp_path, "fails")
    assert server[0] != 0
    assert "PeerLostError" in server[1]
    assert all("ValueError: no data" in text for _, text in workers)


def take_part(what: str) -> None:
    """Be the server or a worker of a job without a table. How a process ends has no part in it, else see `start`."""
    fleet.init(strategy=fleet.DistributedStrategy(a_sync=False))
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    if what == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    fleet.stop_worker()


def outcomes(folder: Path, what: str, **more: str) -> list[Outcome]:
    """Return what became of the server and of the workers."""
    shared, own = fleet_variables(folder)
    env = FLEET_ONLY | {"PADDLE_TRAINER_ID": None, "PADDLE_CURRENT_ENDPOINT": None} | shared | more
    return run_ranks(take_part, 3, what, env=env, env_of_rank=own.__getitem__, expect_failure=True)


def test_workers_may_leave_at_once(tmp_path: Path) -> None:
    for outcome in outcomes(tmp_path, "leaves at once"):
        assert not outcome.failed, outcome.output


def test_a_server_whose_workers_were_killed_before_their_first_table_ends_and_says_so(tmp_path: Path) -> None:
    server, *workers = outcomes(tmp_path, "is killed", PHALANX_COLLECTIVE_TIMEOUT_S="3")
    assert [worker.exit_code for worker in workers] == [-9, -9]
    assert server.exit_code == 1
    assert "No worker came to its first table in the 3 s since this server started" in server.message


def test_under_the_launcher_servers_end_without_a_complaint(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = launch_servers_warm(tmp_path, 1, 2, "train.py", "leaves at once")
    assert done.code == 0, done.out
    assert "ERROR" not in done.out
    assert "server 0: all workers have left" in done.log("serverlog.0")
