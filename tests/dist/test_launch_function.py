"""`px.launch`: a function on several ranks, wherever it is defined."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx as px
from phalanx import accelerator
from phalanx.cluster import proc
from phalanx.errors import LaunchError
from phalanx.launch import from_function

pytestmark = pytest.mark.dist


def test_the_result_of_rank_0_comes_back_from_a_function_that_cannot_be_pickled() -> None:
    x = torch.arange(4.0)
    before = dict(os.environ)

    def train(scale: float) -> tuple[int, int, Tensor, float]:
        context = px.init()
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        px.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(x[None] * (context.rank + scale)).sum().backward()
        assert model.weight.grad is not None
        return context.rank, context.world_size, model.weight.grad, float(px.comm.all_reduce(torch.ones(1)))

    rank, world, gradient, total = px.launch(train, 2, 1.0)
    assert (rank, world, total) == (0, 2, 2.0)
    assert torch.equal(gradient[0], x * 1.5)
    assert dict(os.environ) == before
    assert px.launch(lambda: os.environ["PHALANX_WORLD_SIZE"], 1) == "1"


def test_no_rank_begins_before_all_are_copied() -> None:
    """One that connects to the store has a thread of this process take a lock, which further copies would inherit."""
    before, (reads, writes) = len(proc.children(os.getpid())), os.pipe()

    def count() -> int:
        if os.environ["PHALANX_RANK"] != "0":
            return len(os.read(reads, 1))  # until rank 0 has counted
        number = len(proc.children(os.getppid()))
        os.write(writes, bytes(5))
        return number

    assert px.launch(count, 6) == before + 6
    os.close(reads)
    os.close(writes)


@pytest.mark.parametrize("end", ["kill", "interrupt"])
def test_ranks_that_wait_for_others_to_be_copied_end(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start, processes = from_function._start, list[ForkProcess]()

    def start_and_end(*args: Any) -> Any:
        rank = start(*args)
        processes.append(rank.process)
        if end == "interrupt" and len(processes) == 2:
            raise KeyboardInterrupt
        if end == "kill" and len(processes) == 1:
            rank.process.kill()
            rank.process.join()
        return rank

    monkeypatch.setattr(from_function, "_start", start_and_end)
    if end == "kill":
        with pytest.raises(LaunchError, match=r"rank 0 of px.launch failed: was ended by signal 9"):
            px.launch(print_nothing, 3)
    else:
        with pytest.raises(KeyboardInterrupt):
            px.launch(print_nothing, 3)
    for process in processes:
        process.join(10)
        assert not process.is_alive()


def test_the_error_of_a_rank_is_raised_with_its_rank_and_traceback() -> None:
    def fail_on(rank: int) -> None:
        if px.init().rank == rank:
            raise KeyError("the label of row 7")
        px.comm.barrier("never", timeout_s=60)

    with pytest.raises(LaunchError, match=r"rank 1 of px.launch failed: KeyError: 'the label of row 7'") as caught:
        px.launch(fail_on, 2, 1)
    assert "in fail_on" in str(caught.value)

    with pytest.raises(LaunchError, match=r"rank 0 of px.launch failed: was ended by signal 9. What it printed"):
        px.launch(lambda: os.kill(os.getpid(), signal.SIGKILL), 1)
    with pytest.raises(LaunchError, match=r"rank 0 of px.launch failed: .*pickle"):
        px.launch(lambda: lambda: None, 1)


def test_what_cannot_be_copied_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match="takes a function and a number of ranks, 1 or more, found function and 0"):
        px.launch(print_nothing, 0)
    with pytest.raises(LaunchError, match="was called inside a rank of a job"):
        px.launch(lambda: px.launch(print_nothing, 1), 1)
    px.init()
    with pytest.raises(LaunchError, match=r"Call px.shutdown\(\) first"):
        px.launch(print_nothing, 1)
    px.shutdown()
    monkeypatch.setattr(accelerator, "device_in_use", lambda: torch.device("cuda", 0))
    with pytest.raises(LaunchError, match="which has used a GPU already, and CUDA does not survive that"):
        px.launch(print_nothing, 1)


def print_nothing() -> None:
    """Do nothing."""


def test_a_function_of_main_is_launched_from_a_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import phalanx as px\n"
        "class Result:\n    pass\n"
        "def train():\n    result = Result()\n    result.ranks = px.init().world_size\n    return result\n"
        "print('ranks', px.launch(train, 2).ranks)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines()[-1] == "ranks 2", done.stderr
