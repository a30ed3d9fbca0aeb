"""The benchmarks of the wire keep working; their numbers are nobody's test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist


def rows_of(bench: str, *cases: str) -> list[str]:
    """Run a benchmark at toy size and return the cases that it prints."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{bench}", "--json", "--quick", "--cases", ",".join(cases)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["bench"] == bench
    return [row["case"] for row in printed["rows"]]


def test_the_transport_benchmark_prints_one_object() -> None:
    peers = ("raw Unix socket", "multiprocessing.connection")
    cases = [f"{case} {peer}" for case in ("tiny", "pull") for peer in peers]
    assert rows_of("bench_transport", "tiny", "pull") == cases


def test_the_benchmark_of_tls_prints_one_object() -> None:
    case = "26 tables bfloat16"
    assert rows_of("bench_between_hosts", case) == [f"{case}, {what}" for what in ("server CPU", "worker CPU", "steps")]
