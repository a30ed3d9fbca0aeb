"""The transport benchmark keeps working; its numbers are nobody's test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist


def test_the_benchmark_prints_one_object() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench_transport", "--json", "--quick", "--cases", "tiny,pull"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["bench"] == "bench_transport"
    peers = ("raw Unix socket", "multiprocessing.connection")
    assert [row["case"] for row in found["rows"]] == [f"{case} {peer}" for case in ("tiny", "pull") for peer in peers]
