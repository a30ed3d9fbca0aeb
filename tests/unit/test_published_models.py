"""Models nobody here wrote are captured operator by operator, and planned to the optimum: `benchmarks.bench_models`."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.bench_models import PlannedModel, format_applied, format_table
from benchmarks.published_models import VISION

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_small_models_are_captured_whole_and_planned_without_a_gap() -> None:
    names = ["Llama-3-8B", "Mixtral-8x7B", *(["Swin-T"] if VISION.is_dir() else [])]
    command = [sys.executable, "-m", "benchmarks.bench_models", "--quick", "--json", "--cases", ",".join(names)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=110)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [(row["model"], row["level"], row["gap"]) for row in rows] == [(name, "graph", 0) for name in names]


def test_models_without_a_plan_have_a_row_too() -> None:
    facts = {"model": "Large", "parameters": 2 * 10**9, "level": "graph", "layers": 7, "capture_s": 1.0, "plan_s": 2.0}
    rows = [
        PlannedModel(**facts, devices=8, plan="No Plan fits"),
        PlannedModel(**facts, devices=16, plan="data=16", gap=0.0, step_ms=12.34, memory_gib=5.0),
    ]
    assert format_table(rows).splitlines()[2:] == [
        "| Large | 2,000M | 7 | 8 | 1.0 | 2.0 |  | No Plan fits |  |  |",
        "|  |  |  | 16 | 1.0 | 2.0 | 0.0 | data=16 | 12.3 | 5.0 |",
    ]


def test_models_that_trained_are_listed_with_the_plans_of_all_numbers_of_ranks_in_a_line() -> None:
    facts = {"model": "Mixtral-8x7B", "loss": 1.2e-16, "params": 0.0}
    rows = [
        {**facts, "ranks": ranks, "way": way, "plan": f"data={ranks} model=1 zero=0 recompute=none"}
        for way in ("chosen", "cut")
        for ranks in (2, 4)
    ]
    assert format_applied(rows).splitlines()[2:] == [
        "| Mixtral-8x7B | chosen | data=2 | 1e-16 | 0e+00 | data=4 | 1e-16 | 0e+00 |",
        "|  | cut | data=2 | 1e-16 | 0e+00 | data=4 | 1e-16 | 0e+00 |",
    ]
