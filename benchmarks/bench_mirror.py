"""What a mirrored shard costs (`mirror=1`): an update that is made twice, against one whose state is sent to a rank.

2 ranks with a shard of AdamW's state each, milliseconds of an update; beside both, an update without a mirror.
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
CASES = {"shards of 1 MB": 1 << 18, "shards of 16 MB": 1 << 22}


def measure(elements: int) -> dict[str, float]:
    """Run 2 ranks once."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "phalanx.launch", "-n", "2", "--log-dir", f"{folder}/log"),
            *(str(ROOT / "benchmarks" / "mirror_rank.py"), str(elements)),
        ]
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"the ranks ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    figure = next(line for line in done.stdout.splitlines() if line.startswith("FIGURE "))
    found: dict[str, float] = json.loads(figure.removeprefix("FIGURE "))
    return found


def rows_of(case: str, elements: int) -> list[Row]:
    """Return the update made twice against both others, of one run."""
    found = measure(elements)
    names = {"copied": "state sent to a rank", "alone": "no mirror"}
    return [
        measure_pairs(
            f"{case}, updated twice",
            lambda: found["twice"],
            lambda other=other: found[other],  # type: ignore[misc]
            pairs=1,
            unit="ms",
            better="lower",
            peer_name=name,
        )
        for other, name in names.items()
    ]


def main() -> None:
    """Run the cases asked for."""
    asked = arguments(list(CASES))
    sizes = {case: 1 << 10 if asked.quick else CASES[case] for case in asked.cases}
    show("bench_mirror", [row for case, size in sizes.items() for row in rows_of(case, size)], as_json=asked.json)


if __name__ == "__main__":
    main()
