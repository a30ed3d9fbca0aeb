"""`phalanx ps` shows what runs, and forgets what does not."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from launching import BIN, Launch

pytestmark = pytest.mark.dist

SCRIPT = """
import json, os
with open(os.environ["PHALANX_EVENTS_FILE"], "a") as file:
    for step in (7, 8):
        file.write(json.dumps({"time": 1.0, "step": step, "loss": 0.25, "samples_per_s": 512.5}) + "\\n")
    file.write('{"time": 1.0, "st')
open(f"up.{os.environ['RANK']}", "w").write("x")
open("gate").read()
"""


def ps(runtime: Path, *flags: str) -> str:
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(runtime)}
    return subprocess.run(
        [str(BIN / "phalanx"), "ps", *flags], env=environment, capture_output=True, text=True, check=True
    ).stdout


def test_running_jobs_are_listed_with_step_and_loss(tmp_path: Path) -> None:
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    (tmp_path / "train.py").write_text(SCRIPT)
    os.mkfifo(tmp_path / "gate")
    running = Launch(("-n", "2", "train.py"), tmp_path, environment={"XDG_RUNTIME_DIR": str(runtime)})
    for rank in range(2):
        running.wait_for(tmp_path / f"up.{rank}")
    (job,) = json.loads(ps(runtime, "--json"))
    assert (job["script"], job["pid"], job["mode"]) == ("train.py", running.process.pid, "collective")
    assert 0 < job["age_s"] < 60
    assert [(p["role"], p["rank"], p["step"], p["loss"]) for p in job["processes"]] == [
        ("worker", 0, 8, 0.25),
        ("worker", 1, 8, 0.25),
    ]
    assert {p["pid"] for p in job["processes"]} <= set(running.alive())
    text = ps(runtime)
    assert f"job {job['job_id']}  train.py  collective  launcher pid {running.process.pid}" in text
    assert "0.25" in text
    assert [line.split()[5] for line in text.splitlines() if line.startswith("  worker")] == ["512.5", "512.5"]
    running.process.kill()
    running.wait()
    running.gone_within(3.0)
    assert ps(runtime) == "No job is running on this host under your account.\n"
    assert list((runtime / "phalanx").iterdir()) == []


TRAIN = """
import time
import torch
from phalanx import fleet, ps
fleet.init()
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
    raise SystemExit
items = ps.SparseEmbedding(2, optimizer=ps.SGD(1.0), name="items")
optimizer = torch.optim.SGD(items.parameters(), lr=1.0)
items(torch.arange(7)).sum().backward()
optimizer.step()
open("gate").read()
fleet.stop_worker()
"""


def test_the_tables_of_parameter_servers_are_listed(tmp_path: Path) -> None:
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    (tmp_path / "train.py").write_text(TRAIN)
    os.mkfifo(tmp_path / "gate")
    command = ("--server-num", "2", "--worker-num", "1", "train.py")
    running = Launch(command, tmp_path, environment={"XDG_RUNTIME_DIR": str(runtime)})
    rows = 0
    while rows < 7 and running.process.poll() is None:
        for server in range(2):
            running.wait_for(tmp_path / "log" / f"status.server.{server}.json")
        (job,) = json.loads(ps(runtime, "--json"))
        rows = sum(server["tables"].get("items", {}).get("rows", 0) for server in job["servers"])
    lines = ps(runtime).splitlines()
    assert next(line.split()[:2] for line in lines if line.startswith("  items")) == ["items", "7"]
    metrics = [line for line in ps(runtime, "--metrics").splitlines() if line.startswith("phalanx_table_rows")]
    assert sum(int(line.split()[-1]) for line in metrics) == 7
    (tmp_path / "gate").write_text("go")
    assert running.wait().code == 0


def test_a_folder_others_can_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "phalanx").mkdir(mode=0o755)
    done = subprocess.run(
        [str(BIN / "phalanx"), "ps"],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "is not a private folder of this user (owner" in done.stderr
