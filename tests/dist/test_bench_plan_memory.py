"""A rank takes the memory that the planner says, and runs out of memory with half of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.bench_plan_memory import count_answers

pytestmark = pytest.mark.dist


def test_plans_take_what_is_predicted_and_train_under_the_limits_that_they_fit() -> None:
    command = [sys.executable, "-m", "benchmarks.bench_plan_memory", "--json", "--quick", "--cases=gpt", "--ranks=2"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["kinds"]["loop"] for row in rows] == ["out = model(x)"] * 2 + ["loss_fn(model(x), y)"] * 2
    kept, released = rows[:2], rows[2:]
    assert all(abs(row["error"]) < 0.06 for row in kept), [(row["plan"], row["error"]) for row in kept]
    for before, after in zip(kept, released, strict=True):  # what libraries have beside tensors is in both
        assert before["plan"] == after["plan"]
        less = before["predicted"] - after["predicted"]
        assert less > 0.08 * before["predicted"]
        assert before["private"] - after["private"] == pytest.approx(less, rel=0.15)
    assert count_answers(rows) == {0.5: {(False, False): 4}, 1.5: {(True, True): 4}}
