"""The launch benchmark keeps working; its numbers are nobody's test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist


def test_the_benchmark_prints_one_object() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench_launch", "--json", "--quick"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["bench"] == "bench_launch"
    assert [row["case"] for row in found["rows"]] == [
        "start to first all_reduce 2 ranks torchrun",
        "death of a rank to exit torchrun",
    ]
    for row in found["rows"]:
        assert set(row) == {"case", "unit", "better", "ours", "peer", "peer_name", "ratio"}
        assert row["ratio"]["min"] <= row["ratio"]["median"] <= row["ratio"]["max"]
