"""Data workers leave with the process that trains, however it ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.fault

TRAIN = """
import os, sys, time
import torch
from phalanx.data import GeneratorDataset, Pipeline, ShardedLoader

def reader():
    yield (os.getpid(),)
    yield (os.getpid(),)
    time.sleep(600)  # a camera that sends nothing more

def slow(x):
    time.sleep(600 if x > 3 else 0)
    return torch.tensor(os.getpid())

def main():
    if sys.argv[1] == "generator":
        loader = ShardedLoader(GeneratorDataset(reader, "pid", capacity=8, process=True), batch_size=1)
    else:
        data = Pipeline((torch.arange(100),)).map(slow).batch(1)
        context = "forkserver" if "forkserver" in sys.argv else "fork"
        loader = ShardedLoader(data, shuffle=False, num_workers=2, multiprocessing_context=context)
    batches = iter(loader)  # lives until the end: a loop that is over waits 5 s for each worker
    for _ in range(2):
        (pid,) = next(batches)
        print(int(pid), flush=True)
    sys.stdin.readline()
    os._exit(0)

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


@pytest.mark.parametrize("how", ["generator", "pipeline", "pipeline forkserver", "pipeline forkserver ends"])
def test_workers_that_wait_die_with_a_killed_parent(script: Path, how: str) -> None:
    """A fork server is their parent where it has started them, and lives on."""
    command = [sys.executable, script, *how.split()]
    training = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert training.stdin is not None
    assert training.stdout is not None
    try:
        workers = {int(training.stdout.readline()) for _ in range(2)}
        assert training.pid not in workers
        # A handle of a process becomes readable when it has ended.
        handles = [os.pidfd_open(worker) for worker in workers]
        if "ends" in how:
            training.stdin.close()
        else:
            training.send_signal(signal.SIGKILL)
        for handle in handles:
            assert select.select([handle], [], [], 10.0)[0], "a data worker outlived the training"
            os.close(handle)
    finally:
        training.kill()
        training.wait()
        training.stdin.close()
        training.stdout.close()
