"""Two ranks of which one has a part of a core: samples/s against the sum of both speeds, torch DDP and Accelerate.

    python -m benchmarks.bench_unequal [--quick] [--json] [--cases "50 %,33 %"]

The slow rank is in a control group with a CFS quota, which changes in mid-run: each engine trains through all cases in
one run. Beside them is the sum of the speeds: what each rank trains alone, with its quota, in the same process just
before and after. Needs control groups of version 1 (`cpu.cfs_quota_us`) and the right to make one.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.report import Row, arguments, show

ROOT = Path(__file__).parent.parent
RANK_SCRIPT = ROOT / "benchmarks" / "unequal_rank.py"
GROUPS = Path("/sys/fs/cgroup/cpu")
CASES = {"50 %": 0.5, "33 %": 0.33, "25 %": 0.25}
"""Parts of a core that the slow rank has, in the order of the run."""

ENGINES = {
    "samples": 'balance="samples"',
    "replicas": 'balance="replicas"',
    "even": "even parts",
    "ddp": "torch DDP",
    "accelerate": "Accelerate",
}
SUM, AT_ONCE = "the sum of the speeds of both alone", "both at once, each by itself"

Figures = list[dict[str, Any]]
"""Of each phase: `cores`, samples/s of both ranks `alone` one after the other, of both `at once` without a word between
them, and together `settled` and over the `whole` phase."""


@contextmanager
def control_group(name: str) -> Iterator[Path]:
    """Make a control group for one rank, and remove it.

    Raises:
        SystemExit: If none can be made here; says why.
    """
    group = GROUPS / f"phalanx-bench-{os.getpid()}-{name}"
    try:
        group.mkdir()
        (group / "cpu.cfs_quota_us").write_text("-1")
        (group / "cpu.shares").write_text("262144")  # the quota alone is to hold it, not what else runs here
    except OSError as error:
        group.exists() and group.rmdir()
        raise SystemExit(f"bench_unequal is skipped: {group} with a CPU quota cannot be made: {error}") from None
    try:
        yield group
    finally:
        for pid in (group / "cgroup.procs").read_text().split():  # of ranks that a time-out left
            (GROUPS / "cgroup.procs").write_text(pid)
        group.rmdir()


def train(engine: str, phases: list[float], groups: Sequence[Path], sizes: dict[str, float]) -> Figures:
    """Train through phases on two ranks under one engine."""
    work = [str(RANK_SCRIPT), "--engine", engine, "--groups", *map(str, groups), "--phases", ",".join(map(str, phases))]
    work += [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    with tempfile.TemporaryDirectory() as log_dir:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        ours = [sys.executable, "-m", "phalanx.launch", "-n", "2", "--log-dir", log_dir]
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = torchrun if engine in ("ddp", "accelerate") else ours
        done = subprocess.run([*command, *work], env=env, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{engine} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    for line in (done.stdout + done.stderr).splitlines():
        if "move to faster ranks" in line:
            print(f"{engine}: {line}", file=sys.stderr)
    figure = next(line for line in done.stdout.splitlines() if line.startswith("FIGURE "))
    found: Figures = json.loads(figure.removeprefix("FIGURE "))
    return found


def compare(cases: list[str], groups: Sequence[Path], sizes: dict[str, float], rounds: int) -> list[Row]:
    """Measure all engines in turn, several times over."""
    found: dict[str, list[Figures]] = {}
    for _ in range(rounds):
        for engine in ENGINES:
            found.setdefault(engine, []).append(train(engine, [CASES[case] for case in cases], groups, sizes))
    rows = []
    for number, case in enumerate(cases):
        for engine, name in ENGINES.items():
            phase = [figures[number] for figures in found[engine]]
            sums = [figures["alone"] for figures in phase]
            settled = [figures["settled"] for figures in phase]
            rows.append(_row(f"{case} {name}", settled, sums, SUM))
            rows.append(_row(f"{case} {name}", settled, [figures["at once"] for figures in phase], AT_ONCE))
            if engine in ("samples", "replicas"):
                whole = [figures["whole"] for figures in phase]
                rows.append(_row(f"{case} {name}, the change included", whole, sums, SUM))
    return rows


def _row(case: str, ours: list[float], peer: list[float], peer_name: str) -> Row:
    ratios = [a / b for a, b in zip(ours, peer, strict=True)]
    ratio = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
    return Row(case, "samples/s", "higher", statistics.median(ours), statistics.median(peer), peer_name, ratio)


def main() -> None:
    """Run the cases asked for."""
    asked = arguments(list(CASES))
    quick, full = {"settle": 4, "updates": 3, "alone_s": 0.3}, {"settle": 60, "updates": 40, "alone_s": 3.0}
    with control_group("fast") as fast, control_group("slow") as slow:
        rows = compare(asked.cases, (fast, slow), quick if asked.quick else full, rounds=1)
    show("bench_unequal", rows, as_json=asked.json)


if __name__ == "__main__":
    main()
