"""Servers are started again one after the other while workers train: the tables are those of a calm run."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from launching import BIN, SPARSE_MODEL, WARM, Launch, result_of, wait_until

pytestmark = pytest.mark.fault

SCRIPT = (
    SPARSE_MODEL
    + """
import json, subprocess, sys
from pathlib import Path
from phalanx.ps.client import table_client

fleet.init(strategy=fleet.DistributedStrategy(a_sync=False))
if fleet.is_server():
    loop = "trap 'touch signalled' USR1; touch runs; while sleep 0.05; do :; done"
    subprocess.Popen(["sh", "-c", loop])
    fleet.init_server()
    fleet.run_server()
    sys.exit()
worker, stop = fleet.worker_index(), Path("stop")

def last_step(step):
    # Worker 1 begins step k + 2 when worker 0 has pushed step k + 1: the file is there by then.
    if worker == 0 and Path("restarted").exists() and not stop.exists():
        stop.with_suffix(".part").write_text(str(step + 3))
        stop.with_suffix(".part").rename(stop)
    return int(stop.read_text()) if stop.exists() else step + 1

def train(name):
    torch.manual_seed(0)
    model = Model()
    model.ids = px.ps.SparseEmbedding(4, init=px.ps.Constant(0.1), name=name)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    model = fleet.distributed_model(model)
    step = 0
    while step < last_step(step):
        ids = torch.randint(500, (8, 2), generator=torch.Generator().manual_seed(2 * step + worker))
        optimizer.zero_grad()
        F.mse_loss(model(ids), (ids.sum(1, keepdim=True) % 2).float()).backward()
        optimizer.step()
        step += 1
        if step == 10:
            Path(f"trains.{worker}").touch()
    with torch.no_grad():
        return [step, model.head.weight.tolist(), model.ids(torch.arange(500)).tolist()]

restarted = train("restarted")
print("RESULT", json.dumps([restarted, train("calm")]), flush=True)
fleet.stop_worker()
"""
)


def start(folder: Path, *flags: str) -> Launch:
    (folder / "train.py").write_text(SCRIPT)
    job = Launch(("--server_num", "2", "--worker_num", "2", *flags, "train.py"), folder, program=WARM)
    for worker in range(2):
        wait_until((folder / f"trains.{worker}").exists)
    return job


def restart_servers(job: Launch) -> subprocess.CompletedProcess[str]:
    order = [BIN / "phalanx", "restart-servers", str(job.process.pid), "--json"]
    return subprocess.run(order, capture_output=True, text=True, check=False)


def end(job: Launch) -> Launch:
    (job.cwd / "restarted").touch()
    done = job.wait(100.0)
    done.gone_within(1.0)
    assert done.code == 0, done.out + done.err
    return done


def test_servers_started_again_one_after_the_other_lose_no_update_and_use_up_no_restart(tmp_path: Path) -> None:
    job = start(tmp_path, "--max_restarts", "1")
    for _ in range(2):
        report = restart_servers(job)
        assert report.returncode == 0, report.stderr
        assert json.loads(report.stdout)["restarted"] == ["server 0", "server 1"]
    done = end(job)
    for worker in range(2):
        restarted, calm = result_of(done.log(f"workerlog.{worker}"))
        assert restarted == calm
    for server in range(2):
        assert done.log(f"serverlog.{server}").count("ends to be started again") == 2
        # The base has everything, but what was pushed while it was written.
        assert done.log(f"serverlog.{server}").count("recovered from") == 2
    assert "restarts left" not in done.out + done.err
    # The signal was for the server, not for what its script has started.
    assert (tmp_path / "runs").exists()
    assert not (tmp_path / "signalled").exists()


def test_servers_are_started_again_when_the_whole_job_was_and_no_restart_is_left(tmp_path: Path) -> None:
    job = start(tmp_path, "--max-restarts", "1")
    for worker in range(2):
        (tmp_path / f"trains.{worker}").unlink()
    launcher = job.process.pid
    os.kill(int(Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()[0]), signal.SIGKILL)
    for worker in range(2):
        wait_until((tmp_path / f"trains.{worker}").exists)
    report = restart_servers(job)
    assert report.returncode == 0, report.stderr
    done = end(job)
    assert "restart 1 of 1" in done.out
    assert "ends to be started again" in done.log("serverlog.0")


def test_servers_that_keep_no_state_are_not_started_again(tmp_path: Path) -> None:
    job = start(tmp_path)
    report = restart_servers(job)
    assert report.returncode == 1
    assert "has no servers that can be started again: phalanx run --max-restarts 1" in report.stderr
    end(job)
