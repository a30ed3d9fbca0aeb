from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist


def test_the_benchmark_prints_one_object() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench_checkpoint", "--json", "--quick"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [row["case"].split()[0] for row in found["rows"]] == ["save", "load", "stall"]
    assert all(row["ratio"]["median"] > 0 for row in found["rows"])
