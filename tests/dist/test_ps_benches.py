"""The benchmarks of servers keep working; their numbers are nobody's test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.bench_parameter_server import ours

pytestmark = pytest.mark.dist


def test_many_servers_and_workers_print_three_figures_of_a_case() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench_many_servers", "--json", "--quick", "--cases", "2x2", "--keys", "20"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["case"] for row in rows] == ["2x2 requests", "2x2 worker", "2x2 servers"]
    assert rows[0]["ours"] > 0


@pytest.mark.parametrize(
    ("bench", "flags"),
    [
        ("bench_fan_out", ("--servers", "2", "--tables", "2", "--keys", "20")),
        ("bench_recovery", ("--rows", "20000")),
        ("bench_server_cores", ("--cases", "13000 keys with log")),
        ("bench_tiers", ("--rows", "20000", "--warm", "0", "--cases", "train")),
    ],
)
def test_a_benchmark_of_servers_runs_at_toy_size(bench: str, flags: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", f"benchmarks.{bench}", "--json", "--quick", *flags]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["bench"] == bench


@pytest.mark.parametrize("mode", ["async", "hybrid", "sync"])
def test_bags_are_trained_in_every_mode_that_is_measured(mode: str) -> None:
    assert ours(mode, 2, script="phalanx_bags_worker.py", ids="zipf") > 0
