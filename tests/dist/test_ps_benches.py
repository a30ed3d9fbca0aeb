"""The benchmarks of servers and their wire keep working; their numbers are nobody's test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench_parameter_server import ours

pytestmark = pytest.mark.dist


def printed_by(bench: str, *flags: str) -> dict[str, Any]:
    """Run a benchmark at toy size and return the object that it prints."""
    command = [sys.executable, "-m", f"benchmarks.{bench}", "--json", "--quick", *flags]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed: dict[str, Any] = json.loads(done.stdout)
    assert printed["bench"] == bench
    return printed


@pytest.mark.parametrize(
    ("bench", "flags", "rows"),
    [
        ("bench_between_hosts", ("--cases", "26 tables bfloat16"), 3),
        ("bench_fan_out", ("--servers", "2", "--tables", "2", "--keys", "20"), 3),
        ("bench_many_servers", ("--cases", "2x2", "--keys", "20"), 3),
        ("bench_server_cores", ("--cases", "13000 keys with log"), 1),
        ("bench_tiers", ("--rows", "20000", "--warm", "0", "--cases", "train"), 1),
        ("bench_transport", ("--cases", "tiny,pull"), 4),
    ],
)
def test_a_benchmark_of_servers_measures_each_row(bench: str, flags: tuple[str, ...], rows: int) -> None:
    measured = [row["ours"] for row in printed_by(bench, *flags)["rows"]]
    assert len(measured) == rows
    assert all(figure > 0 for figure in measured)


def test_a_killed_server_of_the_benchmark_has_every_row() -> None:
    printed = printed_by("bench_recovery", "--rows", "20000")
    assert (printed["rows_after"], printed["different_chunks"], printed["is_once"]) == (20_000, 0, True)


@pytest.mark.parametrize("mode", ["async", "hybrid", "sync"])
def test_bags_are_trained_in_every_mode_that_is_measured(mode: str) -> None:
    assert ours(mode, 2, script="phalanx_bags_worker.py", ids="zipf") > 0
