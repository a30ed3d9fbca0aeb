"""Bytes that one of 2 ranks holds between steps, as `px.explain` tells them, against the memory behind the tensors.

The ratio is 1 where `explain` is right. Activations are those of one forward pass; sharded models have none told.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.memory_rank import CASES
from benchmarks.report import Row, arguments, measure_pairs, show

ROOT = Path(__file__).parent.parent


def measure(cases: list[str], width: int) -> dict[str, dict[str, dict[str, int]]]:
    """Run 2 ranks once; return bytes by case and kind."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "phalanx.launch", "-n", "2", "--log-dir", f"{folder}/log"),
            *(str(ROOT / "benchmarks" / "memory_rank.py"), ",".join(cases), str(width)),
        ]
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"the ranks ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    figure = next(line for line in done.stdout.splitlines() if line.startswith("FIGURE "))
    found: dict[str, dict[str, dict[str, int]]] = json.loads(figure.removeprefix("FIGURE "))
    return found


def row(case: str, kind: str, found: dict[str, int]) -> Row:
    """Return the row of one kind of memory."""
    told, there = (lambda: float(found["told"])), (lambda: float(found["there"]))
    name = f"{case}, {kind}, 2 ranks, tracked storages"
    return measure_pairs(name, told, there, pairs=1, unit="bytes", better="lower", peer_name="tracked storages")


def main() -> None:
    """Run the cases asked for."""
    asked = arguments(list(CASES))
    found = measure(asked.cases, 64 if asked.quick else 512)
    rows = [row(case, kind, both) for case, kinds in found.items() for kind, both in kinds.items()]
    show("bench_memory", rows, as_json=asked.json)


if __name__ == "__main__":
    main()
