"""Samples/s of `px.distribute` under `phalanx run` against torch DDP under torchrun, 2 ranks on one host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.report import Row, arguments, measure_pairs, show

ROOT = Path(__file__).parent.parent
RANK_SCRIPT = ROOT / "benchmarks" / "data_parallel_rank.py"
STEPS = {"lenet": 300, "mlp": 100, "resnet18": 40}
"""Timed steps of one run; LeNet is where latency counts, the MLP where bytes do, ResNet-18 where arithmetic does."""


def samples_per_s(engine: str, model: str, steps: int) -> float:
    """Train one model on 2 ranks under one engine and return its samples/s."""
    work = [str(RANK_SCRIPT), "--engine", engine, "--model", model, "--steps", str(steps)]
    with tempfile.TemporaryDirectory() as log_dir:
        launchers = {
            "phalanx": [sys.executable, "-m", "phalanx.launch", "-n", "2", "--log-dir", log_dir],
            "ddp": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
        }
        # Both with one thread a rank, which is what either would choose here.
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*launchers[engine], *work], env=env, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{engine} {model} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    figure = next(line for line in done.stdout.splitlines() if line.startswith("FIGURE "))
    return float(json.loads(figure.removeprefix("FIGURE "))["samples_per_s"])


def compare(model: str, *, steps: int, pairs: int) -> Row:
    """Measure one model under both engines in turn."""
    return measure_pairs(
        f"{model} 2 ranks torch DDP",
        lambda: samples_per_s("phalanx", model, steps),
        lambda: samples_per_s("ddp", model, steps),
        pairs=pairs,
        unit="samples/s",
        better="higher",
        peer_name="torch DDP under torchrun",
    )


def main() -> None:
    """Run the cases asked for."""
    asked = arguments(list(STEPS))
    rows = [
        compare(model, steps=4 if asked.quick else STEPS[model], pairs=1 if asked.quick else 7) for model in asked.cases
    ]
    show("bench_data_parallel", rows, as_json=asked.json)


if __name__ == "__main__":
    main()
