"""Save, load and stall of a background save against torch's DCP: the same 2 ranks, the same state, in turn.

Files of both are made durable (fsync). Ours also have checksums, computed when they are written and compared when they
are read, which DCP has not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.report import Row, arguments, measure_pairs, show

ROOT = Path(__file__).parent.parent
CASES = {
    "save": "save 2 ranks torch DCP",
    "load": "load 2 ranks torch DCP",
    "stall": "stall of a background save 2 ranks torch DCP async",
}
MEGABYTES = 384
"""Parameters and Adam's state."""


def measure(cases: list[str], megabytes: int, pairs: int) -> tuple[int, dict[str, list[dict[str, float]]]]:
    """Run 2 ranks once; return the bytes of the state, and for each case the seconds of every pair."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "phalanx.launch", "-n", "2", "--log-dir", f"{folder}/log"),
            str(ROOT / "benchmarks" / "checkpoint_rank.py"),
            *("--folder", folder, "--megabytes", str(megabytes), "--pairs", str(pairs), "--cases", ",".join(cases)),
        ]
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise RuntimeError(f"the ranks ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    figure = next(line for line in done.stdout.splitlines() if line.startswith("FIGURE "))
    found = json.loads(figure.removeprefix("FIGURE "))
    return found["bytes"], found["pairs"]


def row(case: str, state_bytes: int, pairs: list[dict[str, float]]) -> Row:
    """Return the row of a case: GB/s, or the seconds that training stands still."""
    is_rate = case != "stall"
    values = [{side: state_bytes / 1e9 / s if is_rate else s for side, s in pair.items()} for pair in pairs]
    ours, peer = (iter([pair[side] for pair in values]) for side in ("ours", "peer"))
    return measure_pairs(
        CASES[case],
        lambda: next(ours),
        lambda: next(peer),
        pairs=len(values),
        unit="GB/s" if is_rate else "s",
        better="higher" if is_rate else "lower",
        peer_name="torch DCP",
    )


def main() -> None:
    """Run the cases asked for."""
    asked = arguments(list(CASES))
    state_bytes, found = measure(asked.cases, 12 if asked.quick else MEGABYTES, 1 if asked.quick else 7)
    show("bench_checkpoint", [row(case, state_bytes, found[case]) for case in asked.cases], as_json=asked.json)


if __name__ == "__main__":
    main()
