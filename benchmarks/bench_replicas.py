"""Logical replicas: do 1, 2, 3 and 4 ranks train the same bits, and what does a step cost; torch DDP beside it.

    python -m benchmarks.bench_replicas [--quick] [--json] [--cases "mlp sgd,cost mlp sgd"]

A case counts the different SHA-256 of the weights after 200 updates: 1 is right. ResNet-18 is also trained on 2, then
3, then 1 ranks, which change in the middle of epochs. "cost" compares 2 replicas on 2 ranks with no replicas.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.replicas_rank import CASES
from benchmarks.report import Row, arguments, measure_pairs, show

ROOT = Path(__file__).parent.parent
RANK_SCRIPT = ROOT / "benchmarks" / "replicas_rank.py"
RANKS = (1, 2, 3, 4)
CHANGED = "resnet18 batch norm"
"""The case that is also trained on changing numbers of ranks."""

COSTS = {"cost mlp sgd": 400, "cost resnet18 batch norm": 30, "cost gpt dropout adamw clip": 60}
"""Timed updates of one run."""


def train(engine: str, case: str, ranks: int, *options: object) -> dict[str, Any]:
    """Train a case on so many ranks; return what rank 0 printed."""
    work = [str(RANK_SCRIPT), "--engine", engine, "--case", case, *map(str, options)]
    with tempfile.TemporaryDirectory() as log_dir:
        launchers = {
            "phalanx": [sys.executable, "-m", "phalanx.launch", "-n", str(ranks), "--log_dir", log_dir],
            "ddp": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)],
        }
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*launchers[engine], *work], env=env, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(
            f"{engine} {case} on {ranks} ranks ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    figure = next(line for line in done.stdout.splitlines() if line.startswith("FIGURE "))
    result: dict[str, Any] = json.loads(figure.removeprefix("FIGURE "))
    return result


def train_changed(case: str, steps: int) -> str:
    """Train on 2, then 3, then 1 ranks; return the digest of the weights."""
    parts = [steps // 3, steps // 3 + 1, steps - 2 * (steps // 3) - 1]
    with tempfile.TemporaryDirectory() as folder:
        saved: list[object] = []
        for number, (ranks, part) in enumerate(zip((2, 3, 1), parts, strict=True)):
            here = Path(folder) / str(number)
            figure = train("phalanx", case, ranks, "--steps", part, "--save", here, *saved)
            saved = ["--load", here]
    return str(figure["sha256"])


def count_digests(case: str, steps: int) -> Row:
    """Count the different weights over the numbers of ranks, with us and with torch DDP."""

    def count(engine: str) -> float:
        digests = {train(engine, case, ranks, "--steps", steps)["sha256"] for ranks in RANKS}
        if engine == "phalanx" and case == CHANGED:
            digests.add(train_changed(case, steps))
        return float(len(digests))

    return measure_pairs(
        f"{case} torch DDP",
        lambda: count("phalanx"),
        lambda: count("ddp"),
        pairs=1,
        unit="different weights on 1, 2, 3, 4 ranks",
        better="lower",
        peer_name="torch DDP under torchrun",
    )


def compare_cost(case: str, steps: int, pairs: int) -> Row:
    """Compare the seconds of an update of 2 replicas on 2 ranks with those of no replicas."""
    name = case.removeprefix("cost ")

    def seconds(replicas: int) -> float:
        warm = max(2, steps // 10)
        options = ("--steps", steps + warm, "--warm", warm, "--replicas", replicas)
        return float(train("phalanx", name, 2, *options)["seconds"])

    return measure_pairs(
        f"{case} without replicas",
        lambda: seconds(2),
        lambda: seconds(0),
        pairs=pairs,
        unit="s/update",
        better="lower",
        peer_name="the same without replicas",
    )


def main() -> None:
    """Run the cases asked for."""
    asked = arguments([*CASES, *COSTS])
    rows = []
    for case in asked.cases:
        if case in COSTS:
            rows.append(compare_cost(case, 4 if asked.quick else COSTS[case], 1 if asked.quick else 5))
        else:
            rows.append(count_digests(case, 6 if asked.quick else 200))
    show("bench_replicas", rows, as_json=asked.json)


if __name__ == "__main__":
    main()
