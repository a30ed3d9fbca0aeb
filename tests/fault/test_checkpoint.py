"""Processes killed while they save, and jobs that are asked to end."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import phalanx as px
from launching import WARM, Launch
from phalanx.checkpoint import saving
from phalanx.checkpoint.tensors import safetensors_file
from phalanx.errors import BackendError
from ranks import Outcome, run_ranks

pytestmark = pytest.mark.fault

WRITERS = ("saving.py", "safetensors_file.py", "manifest.py", "checkpoint_folder.py")
"""Files of our code that change the disk."""


class Fuse:
    """Kills this process before line number `moment` of those that it runs in `WRITERS`."""

    def __init__(self, moment: int) -> None:
        self.left = moment

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        path = frame.f_code.co_filename
        if "/checkpoint/" not in path or not path.endswith(WRITERS):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return self


def _save_until(moment: int, folder: Path, step: int) -> int:
    """Save with a fuse; returns how many lines were run."""
    model = nn.Linear(40, 40)
    nn.init.constant_(model.weight, step)
    fuse = Fuse(moment)
    sys.settrace(fuse)
    px.save(folder, model, torch.optim.SGD(model.parameters()), step=step, keep=2)
    sys.settrace(None)
    return moment - fuse.left


def _newest(folder: Path) -> int:
    model = nn.Linear(40, 40)
    step = px.load(folder, model).step
    assert (model.weight == step).all()
    return step


def _kill_saves(folder: Path) -> tuple[int, int]:
    px.init()
    safetensors_file.BLOCK_BYTES = 512  # so that files are cut in the middle too
    _save_until(1 << 30, folder, 0)
    _save_until(1 << 30, folder, 1)
    lines = _save_until(1 << 30, folder, 2)
    draw, known, killed, completed = random.Random(11), 2, 0, 0
    for number in range(20):
        # Half of them save a step that is there already.
        step = known + number % 2
        pid = os.fork()
        if not pid:
            _save_until(draw.randint(1, lines), folder, step)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        killed += os.WIFSIGNALED(status)
        found = _newest(folder)
        assert found in (known, step)
        completed += found != known
        known = found
    _save_until(1 << 30, folder, 100)
    left = sorted(path.name for path in folder.iterdir())
    assert left[0] == "step-100"
    assert len(left) == 2
    assert all(len(list((folder / name).iterdir())) == 3 for name in left)
    return killed, completed


def test_the_checkpoint_before_loads_wherever_a_save_is_killed(tmp_path: Path) -> None:
    ((killed, _),) = run_ranks(_kill_saves, 1, tmp_path)
    assert killed > 15


def _kill_one_of_two(folder: Path, victim: int, share: float) -> None:
    rank = px.init().rank
    saving.WRITE_TIMEOUT_S = 2.0
    lines = _save_until(1 << 30, folder, 1)
    _save_until(1 + int(lines * share) if rank == victim else 1 << 30, folder, 2)


@pytest.mark.parametrize(("victim", "share"), [(0, 0.5), (0, 0.9), (1, 0.7)])
def test_the_checkpoint_before_loads_when_one_rank_is_killed(tmp_path: Path, victim: int, share: float) -> None:
    outcomes: list[Outcome] = run_ranks(
        _kill_one_of_two, 2, tmp_path, victim, share, expect_failure=True, env={"PHALANX_RENDEZVOUS_TIMEOUT_S": "2"}
    )
    assert outcomes[victim].error_type == "Killed"
    other = outcomes[1 - victim]
    assert other.error_type == "PeerLostError"
    assert re.search(rf"rank {victim}\b", other.message)
    assert _newest(tmp_path) in (1, 2)


TRAIN = """
import os, sys, time
import torch, torch.nn.functional as F
from torch import nn
import phalanx as px

torch.manual_seed(0)
model = nn.Linear(6, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = (torch.arange(600.).view(100, 6) / 600, torch.arange(100) % 2)
model, optimizer, loader = px.distribute(model, optimizer, data, global_batch=4, seed=1)
checkpointer = px.Checkpointer("runs", model, optimizer, loader, every=40)
checkpointer.resume()
total = int(sys.argv[1])
while checkpointer.steps < total:
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.step()
        if checkpointer.steps == 20:
            open(f"up.{px.current().rank}", "w").write("x")
        if checkpointer.steps == total:
            break
checkpointer.close()
px.export_state_dict(model, sys.argv[2])
"""


def test_a_job_that_is_asked_to_end_saves_exits_0_and_goes_on_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    running = Launch(("-n", "2", "train.py", "100000000", "never"), tmp_path, program=WARM)
    for rank in range(2):
        running.wait_for(tmp_path / f"up.{rank}")
    running.process.send_signal(signal.SIGTERM)
    assert running.wait(20).code == 0, running.out + running.err
    running.gone_within(1.0)
    steps = max(int(path.name.partition("-")[2]) for path in (tmp_path / "runs").iterdir())
    assert steps >= 20
    total = str(steps + 30)
    other = tmp_path / "other"
    other.mkdir()
    (other / "train.py").write_text(TRAIN)
    through = [
        Launch(("-n", "1", "train.py", total, "resumed"), tmp_path, program=WARM),
        Launch(("train.py", total, "whole"), other, program=WARM),
    ]
    for job in through:
        assert job.wait(60).code == 0, job.out + job.err
    resumed, whole = nn.Linear(6, 2), nn.Linear(6, 2)
    px.load(tmp_path / "resumed", resumed)
    px.load(other / "whole", whole)
    torch.testing.assert_close(resumed.weight, whole.weight, rtol=1e-5, atol=1e-6)


def test_a_last_background_save_that_fails_is_an_exit_code(tmp_path: Path) -> None:
    script = (
        "import torch, phalanx as px, phalanx.checkpoint.saving as saving\n"
        "def broken(*_): raise OSError(5, 'Input/output error')\n"
        "saving.write_manifest = broken\n"
        "px.save('runs', torch.nn.Linear(1, 1), background=True)\n"
    )
    (tmp_path / "train.py").write_text(script)
    plain = Launch(("train.py",), tmp_path, program=(sys.executable,)).wait()
    assert plain.code == 1
    assert "the last background save failed" in plain.err
    launched = Launch(("train.py",), tmp_path, program=WARM).wait()
    assert launched.code == 1
    launched.gone_within(1.0)


def test_a_full_disk_is_named_with_the_bytes_needed_and_free(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", folder], capture_output=True).returncode:
        pytest.skip("a file system of its own can be mounted by root only")
    try:
        with pytest.raises(BackendError) as caught:
            px.save(folder, nn.Linear(300, 300), step=7)
        assert re.search(
            rf"did not take {folder}/\S+rank-0-\w+\.safetensors: No space left on device "
            r"\(3\d\d,\d\d\d bytes are needed, 2\d\d,\d\d\d are free\)\. Make room, or name another folder",
            str(caught.value),
        )
        px.save(folder, nn.Linear(30, 30), step=8)
    finally:
        subprocess.run(["umount", folder], check=True)
