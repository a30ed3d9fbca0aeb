"""Wrong numbers: how many of the faults in `wrong_numbers.py` are named exactly, and what the checks cost.

    python -m benchmarks.bench_verify [--quick] [--json] [--cases "verify wrong seed (loop),flight_log"]

A case is a fault or a flag. Each fault runs in real jobs of 2 ranks, and the command must name cause, tensor, step and
ranks. The cost of a flag is that of an update of ResNet-18 on 2 ranks with and without it, in pairs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.bench_replicas import RANK_SCRIPT
from benchmarks.report import Row, arguments, machine, measure_pairs, show
from benchmarks.wrong_numbers import ALL, WrongNumber

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "benchmarks" / "wrong_numbers_rank.py"
COSTS = ("flight_log", "check_nan_inf")
MOST_S = 300


def is_named(fault: WrongNumber) -> tuple[bool, str]:
    """Run a fault; return whether it is named exactly, and what was said."""
    job = (str(SCRIPT), "--fault", fault.name, "--engine", fault.engine)
    with tempfile.TemporaryDirectory() as folder:
        if fault.tool == "verify":
            return _is_verified(fault, folder, *job)
        if fault.tool == "nan":
            done = _run(folder, "phalanx.launch", "-n", "2", "--check-nan-inf", *job)
            words = _error(Path(folder))
            at = f"step {fault.step}:" if fault.step else "step "
            is_exact = done.returncode != 0 and fault.cause in words and fault.tensor in words and words.startswith(at)
            return is_exact, words
        _run(folder, "phalanx.launch", "-n", "2", "--replicas", "2", "--flight-log", *job)
        report = json.loads(_run(folder, "phalanx", "replay", "--find", "first-difference", "--json", "log").stdout)
        mismatch = report["mismatch"] or {"what": "", "step": -1, "rank": None, "bucket": None}
        is_exact = (mismatch["what"], mismatch["step"]) == (fault.cause, fault.step)
        is_exact = (
            is_exact and fault.ranks in (None, (mismatch["rank"],)) and fault.tensor in (mismatch["bucket"] or ())
        )
        return is_exact, str(mismatch)


def _is_verified(fault: WrongNumber, folder: str, *job: str) -> tuple[bool, str]:
    done = _run(folder, "phalanx", "verify", "-n", "2", "--steps", "5", "--json", *job)
    if not done.stdout.strip():
        return False, done.stderr[-300:]
    verdict: dict[str, Any] = json.loads(done.stdout)
    difference = verdict["difference"] or {"cause": "equal", "tensor": "", "step": -1, "ranks": []}
    is_exact = (difference["cause"], difference["step"]) == (fault.cause, fault.step)
    is_exact = is_exact and (not fault.tensor or difference["tensor"] == fault.tensor)
    is_exact = is_exact and fault.ranks in (None, tuple(difference["ranks"]))
    return is_exact, f"{difference['cause']}: {difference['tensor']}, step {difference['step']}"


def _run(folder: str, module: str, *words: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=folder, env=env, capture_output=True, text=True, timeout=MOST_S, check=False,
    )  # fmt: skip


def _error(folder: Path) -> str:
    records = sorted(folder.glob("log/error.*.json"))
    return str(json.loads(records[0].read_text())["message"]) if records else ""


def cost(flag: str, steps: int, pairs: int) -> Row:
    """Compare seconds of an update with and without a flag."""

    def seconds(*flags: str) -> float:
        options = ("--engine", "phalanx", "--cases", "resnet18 batch norm", "--replicas", "0", "--warm", "3")
        with tempfile.TemporaryDirectory() as folder:
            done = _run(folder, "phalanx.launch", "-n", "2", *flags, str(RANK_SCRIPT), *options, "--steps", str(steps))
        figure = next((line for line in done.stdout.splitlines() if line.startswith("FIGURE ")), "")
        if not figure:
            raise RuntimeError(f"the job with {flags} failed:\n{done.stdout}{done.stderr}")
        return float(json.loads(figure.removeprefix("FIGURE "))["seconds"])

    return measure_pairs(
        f"ResNet-18 with --{flag}",
        lambda: seconds(f"--{flag}"),
        seconds,
        pairs=pairs,
        unit="s/update",
        better="lower",
        peer_name="the same without",
    )


def main() -> None:
    """Run the cases asked for."""
    faults = {f"{fault.tool} {fault.name} ({fault.engine})": fault for fault in ALL}
    asked = arguments([*faults, *COSTS])
    chosen = [fault for case, fault in faults.items() if case in asked.cases]
    outcomes = {fault: is_named(fault) for fault in (chosen[::8] if asked.quick else chosen)}
    rows = [cost(flag, 4 if asked.quick else 33, 1 if asked.quick else 5) for flag in COSTS if flag in asked.cases]
    named = sum(is_exact for is_exact, _ in outcomes.values())
    if asked.json:
        table = [
            {"fault": fault.name, "tool": fault.tool, "engine": fault.engine, "exact": is_exact, "words": words}
            for fault, (is_exact, words) in outcomes.items()
        ]
        costs = [{"case": row.case, "ratio": row.ratio, "ours": row.ours, "peer": row.peer} for row in rows]
        report = {"bench": "bench_verify", "machine": machine(), "named": named, "faults": table, "costs": costs}
        print(json.dumps(report))
        return
    for fault, (is_exact, words) in outcomes.items():
        print(f"{'exact' if is_exact else 'WRONG'}  {fault.tool:6}  {fault.engine:4}  {fault.name:32}  {words[:110]}")
    if outcomes:
        print(f"{named} of {len(outcomes)} faults named exactly")
    show("bench_verify", rows, as_json=False)


if __name__ == "__main__":
    main()
