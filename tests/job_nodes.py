"""Attempts without a controller: a folder with its order and its code, and the nodes that run it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launching import SPARSE_MODEL
from phalanx.jobs.attempt import files as attempt_files
from phalanx.jobs.attempt.files import ExitRecord
from phalanx.jobs.backend import Submission
from phalanx.jobs.backends.local import NODE
from phalanx.jobs.spec.training_job import TrainingJob

DDP = """
import os, sys
import torch
import torch.distributed as dist

def main():
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    print("RESULT", dist.get_rank(), dist.get_world_size(), int(total), flush=True)
    dist.destroy_process_group()

main()
"""
"""The plainest distributed script: it reads RANK and WORLD_SIZE through torch."""


SERVERS = (
    SPARSE_MODEL
    + """
torch.manual_seed(0)
model = Model()
model, optimizer, _ = px.distribute(model, torch.optim.SGD(model.parameters(), lr=0.05))
ctx = px.init()
for step in range(4):
    ids = torch.randint(50, (8, 2))
    optimizer.zero_grad()
    F.mse_loss(model(ids), (ids.sum(1, keepdim=True) % 2).float()).backward()
    optimizer.step()
print("RESULT", ctx.rank, ctx.world_size, flush=True)
"""
)
"""Training with parameter servers, in a file that serves where it is a server."""


def submission(
    home: Path,
    script: str,
    *,
    job: str = "job-1",
    number: int = 1,
    values: Mapping[str, str] | None = None,
    **said: Any,
) -> Submission:
    """Return an attempt at a job whose code is `script`, in place already, with `values` of secrets."""
    spec = TrainingJob.model_validate({"name": "job", "command": "python train.py", **said})
    folder = home / "jobs" / job / f"attempt-{number}"
    (folder / "work").mkdir(parents=True)
    (folder / "work" / "train.py").write_text(script)
    return Submission(job, number, spec, folder, dict(values or {}))


def start_node(made: Submission, node: int, **environment: str) -> subprocess.Popen[bytes]:
    """Start one node of an attempt, as the backend of this machine does."""
    attempt_files.write_spec(made)
    read, write = os.pipe()
    os.write(write, json.dumps(made.secrets).encode())
    os.close(write)
    try:
        return subprocess.Popen(
            [*NODE, str(made.folder), "--node", str(node), "--secrets-fd", str(read)],
            pass_fds=[read],
            env={**os.environ, "PHALANX_LANG": "en", **environment},
            start_new_session=True,
        )
    finally:
        os.close(read)


def ends(made: Submission, nodes: Sequence[subprocess.Popen[bytes]], timeout_s: float = 60.0) -> list[ExitRecord]:
    """Wait for the nodes and return their exit records."""
    for process in nodes:
        process.wait(timeout_s)
    found = [attempt_files.read_exit_record(made.folder, node) for node in range(len(nodes))]
    assert all(found), [path.read_text() for path in sorted(made.folder.glob("logs/node-*.log"))]
    return [end for end in found if end is not None]


def log(made: Submission, name: str) -> str:
    """Text of a log file."""
    return (made.folder / "logs" / name).read_text()
