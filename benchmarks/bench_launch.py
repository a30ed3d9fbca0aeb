"""Time from the command to the first finished all-reduce of 2 ranks, and from a death to the job's end."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report import Row, arguments, measure_pairs, show

CASES = {"start": "start to first all_reduce 2 ranks torchrun", "death": "death of a rank to exit torchrun"}

_START = """
import os, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 0:
    with open(os.environ["BENCH_OUT"], "w") as file:
        file.write(repr(time.time()))
dist.destroy_process_group()
"""

_DEATH = """
import os, signal, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1:
    with open(os.environ["BENCH_OUT"], "w") as file:
        file.write(repr(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(1))
"""

_BIN = Path(sys.executable).parent
OURS = [str(_BIN / "phalanx"), "run", "-n", "2"]
PEER = [str(_BIN / "torchrun"), "--standalone", "--nproc_per_node", "2"]


def _run(command: list[str], script: str, *, from_start: bool, succeeds: bool) -> float:
    """Seconds from the start to the mark the script leaves, or from the mark to the end."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "script.py").write_text(script)
        mark = Path(folder) / "mark"
        # Both with one thread a rank, which is what either would choose here.
        environment = {**os.environ, "BENCH_OUT": str(mark), "OMP_NUM_THREADS": "1"}
        started = time.time()
        done = subprocess.run(
            [*command, "script.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
        )
        ended = time.time()
        if (done.returncode == 0) != succeeds or not mark.exists():
            raise RuntimeError(f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        marked = float(mark.read_text())
    return marked - started if from_start else ended - marked


def start(pairs: int) -> Row:
    """Measure the start."""
    return measure_pairs(
        CASES["start"],
        lambda: _run(OURS, _START, from_start=True, succeeds=True),
        lambda: _run(PEER, _START, from_start=True, succeeds=True),
        pairs=pairs,
        unit="s",
        better="lower",
        peer_name="torchrun",
    )


def death(pairs: int) -> Row:
    """Measure how soon a job is over after a rank was killed."""
    return measure_pairs(
        CASES["death"],
        lambda: _run(OURS, _DEATH, from_start=False, succeeds=False),
        lambda: _run(PEER, _DEATH, from_start=False, succeeds=False),
        pairs=pairs,
        unit="s",
        better="lower",
        peer_name="torchrun",
    )


def main() -> None:
    """Run the cases asked for."""
    asked = arguments(list(CASES))
    pairs = 1 if asked.quick else 7
    measures = {"start": start, "death": death}

    if not asked.quick:
        # The first start of each reads its files from the disk.
        _run(OURS, _START, from_start=True, succeeds=True)
        _run(PEER, _START, from_start=True, succeeds=True)
    rows = [measures[case](pairs) for case in asked.cases]
    show("bench_launch", rows, as_json=asked.json)


if __name__ == "__main__":
    main()
