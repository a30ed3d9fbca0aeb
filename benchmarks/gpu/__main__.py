"""Run every gpu test and the benchmarks of one GPU, and write a page: `make gpu`.

    python -m benchmarks.gpu                    # writes benchmarks/results/gpu_NAME.md
    python -m benchmarks.gpu --try-on-cpu       # the cases at toy size where there is no GPU: no page, no figures

Ends with 0 if all went well, 1 if a test or a case failed (the page says which), and 2 where no GPU is visible.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import torch

from benchmarks.gpu.cases import CASES
from phalanx import accelerator

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
LIMIT_S = 9 * 60.0
"""Longest time of all tests and cases."""

NO_GPU = (
    "No GPU is visible here, so nothing was run and no page was written. torch {version} sees {devices} devices beside "
    "the CPU. Run `make gpu` on a machine with a CUDA build of torch and a GPU; `phalanx doctor` says what is missing."
)


@dataclass(frozen=True, slots=True)
class Result:
    """What became of the tests, or of one case."""

    name: str
    seconds: float
    problem: str = ""
    """Its last lines, if it failed."""

    figures: dict[str, float] = field(default_factory=dict)
    summary: str = ""


def command_of(case: str, *, quick: bool, log_dir: str) -> list[str]:
    """Return what runs a case: `sparse` needs a server."""
    words = [str(ROOT / "benchmarks" / "gpu" / "cases.py"), case, *(["--quick"] if quick else [])]
    servers = ["--server-num", "1", "--worker-num", "1", "--log-dir", log_dir]
    launcher = ["-m", "phalanx.launch", *servers] if case == "sparse" else []
    return [sys.executable, *launcher, *words]


def run(name: str, command: list[str], limit_s: float) -> tuple[float, int, str]:
    """Run a command; return its seconds, its exit code (124 after `limit_s`) and what it printed."""
    began = time.monotonic()
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=max(1.0, limit_s))
    except subprocess.TimeoutExpired:
        return time.monotonic() - began, 124, f"{name} took longer than {limit_s:.0f} s"
    return time.monotonic() - began, done.returncode, done.stdout + done.stderr


def run_case(case: str, *, quick: bool, limit_s: float) -> Result:
    """Run one case in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        seconds, code, text = run(case, command_of(case, quick=quick, log_dir=folder), limit_s)
    line = next((line for line in text.splitlines() if line.startswith("FIGURE ")), None)
    if code or line is None:
        return Result(case, seconds, "\n".join(text.splitlines()[-12:]) or f"ended with {code}")
    return Result(case, seconds, figures=json.loads(line.removeprefix("FIGURE "))["figures"])


def run_tests(limit_s: float) -> Result:
    """Run every test with the marker `gpu`."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--no-header", "tests"]
    seconds, code, text = run("pytest -m gpu", command, limit_s)
    lines = text.splitlines() or [""]
    return Result("pytest -m gpu", seconds, "" if code == 0 else "\n".join(lines[-30:]), summary=lines[-1])


def page(device: str, results: list[Result], day: str) -> str:
    """Return the page of results."""
    tests, *cases = results
    rows = [
        f"| {case.name} | {name} | {value:,.0f} |" for case in cases for name, value in case.figures.items()
    ]  # fmt: skip
    failures = [f"\n## {result.name} failed\n\n```\n{result.problem}\n```" for result in results if result.problem]
    return "\n".join(
        [
            f"# One GPU, {day}",
            "",
            f"{device}, torch {torch.__version__}. `make gpu`, {sum(result.seconds for result in results):.0f} s.",
            "",
            f"Tests: {tests.summary}",
            "",
            "| case | what | value |",
            "|---|---|---|",
            *rows,
            *failures,
            "",
        ]
    )


def main() -> int:
    """Run what is asked for; return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--try-on-cpu", action="store_true", help="run the cases at toy size without a GPU")
    asked = parser.parse_args()
    kind = accelerator.find_kind()
    if kind is None and not asked.try_on_cpu:
        print(NO_GPU.format(version=torch.__version__, devices=accelerator.count_devices()))
        return 2
    ends = time.monotonic() + LIMIT_S
    results = [] if kind is None else [run_tests(LIMIT_S / 2)]
    for case in CASES:
        results.append(run_case(case, quick=kind is None, limit_s=min(120.0, ends - time.monotonic())))
        print(f"{case}: {results[-1].problem or results[-1].figures or 'done'}", flush=True)
    if kind is not None:
        device = accelerator.list_names()[0]
        path = RESULTS / f"gpu_{re.sub(r'[^a-z0-9]+', '_', device.lower()).strip('_')}.md"
        path.write_text(page(device, results, date.today().isoformat()))
        print(f"wrote {path.relative_to(ROOT)}")
    return int(any(result.problem for result in results))


if __name__ == "__main__":
    sys.exit(main())
