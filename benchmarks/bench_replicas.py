"""Logical replicas: do 1, 2, 3 and 4 ranks train the same bits, and what does a step cost; torch DDP beside it.

    python -m benchmarks.bench_replicas [--quick] [--json] [--cases "mlp sgd,cost mlp sgd"]

A case counts the different SHA-256 of the weights after 200 updates: 1 is right. It is also trained on 2, then 3, then
1 ranks, which change in the middle of epochs; and without asking for replicas on 4, then 3, then 1, which is compared
with 4 that stay. "cost" compares 2 replicas on 2 ranks with no replicas.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.replicas_rank import CASES, REPLICAS
from benchmarks.report import Row, arguments, measure_pairs, show

ROOT = Path(__file__).parent.parent
RANK_SCRIPT = ROOT / "benchmarks" / "replicas_rank.py"
RANKS = (1, 2, 3, 4)
CHANGING = (2, 3, 1)
"""Ranks of a run that changes in the middle of epochs, with logical replicas."""

UNASKED = (4, 3, 1)
"""Those of a run that was not asked for replicas, and continues with what its checkpoints were trained with."""

TIMED = {"cost mlp sgd": 400, "cost resnet18 batch norm": 30, "cost gpt dropout adamw clip": 60}
"""Timed updates of one run."""


def train(engine: str, cases: Sequence[str], ranks: int, *options: object) -> dict[str, dict[str, Any]]:
    """Train cases on so many ranks, one after the other; return what rank 0 printed of each."""
    work = [str(RANK_SCRIPT), "--engine", engine, "--cases", ",".join(cases), *map(str, options)]
    with tempfile.TemporaryDirectory() as log_dir:
        launchers = {
            "phalanx": [sys.executable, "-m", "phalanx.launch", "-n", str(ranks), "--log-dir", log_dir],
            "ddp": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)],
        }
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*launchers[engine], *work], env=env, capture_output=True, text=True, timeout=1200)
    if done.returncode:
        raise RuntimeError(
            f"{engine} {cases} on {ranks} ranks ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    lines = [line.removeprefix("FIGURE ") for line in done.stdout.splitlines() if line.startswith("FIGURE ")]
    return {figure["case"]: figure for figure in map(json.loads, lines)}


def digests_of(engine: str, cases: Sequence[str], ranks: int, *options: object) -> dict[str, str]:
    """Return the digest of the weights of each case."""
    figures = train(engine, cases, ranks, *options)
    return {case: str(figures[case]["sha256"]) for case in cases}


def train_changed(cases: Sequence[str], steps: int, by_part: Sequence[int], replicas: int) -> dict[str, str]:
    """Train on numbers of ranks that change in the middle of epochs; return the digests of the weights."""
    each, digests = -(-steps // len(by_part)), {}
    with tempfile.TemporaryDirectory() as folder:
        saved: list[object] = []
        for number, ranks in enumerate(by_part):
            here, part = Path(folder) / str(number), min(each, steps - number * each)
            digests = digests_of(
                "phalanx", cases, ranks, "--steps", part, "--replicas", replicas, "--save", here, *saved
            )
            saved = ["--load", here]
    return digests


def count_digests(cases: Sequence[str], steps: int) -> list[Row]:
    """Count the different weights of each case over numbers of ranks, with us and with torch DDP."""
    ours = [digests_of("phalanx", cases, ranks, "--steps", steps) for ranks in RANKS]
    ours.append(train_changed(cases, steps, CHANGING, REPLICAS))
    alike = {case: case.partition(" zero")[0] for case in cases}  # DDP shards nothing
    plain = list(dict.fromkeys(alike.values()))
    ddp = [digests_of("ddp", plain, ranks, "--steps", steps) for ranks in RANKS]
    rows = [
        _row(case, [each[case] for each in ours], [each[alike[case]] for each in ddp], "1, 2, 3, 4 and 2 > 3 > 1 ranks")
        for case in cases
    ]
    unasked = [case for case in cases if "zero" not in case]
    if unasked:
        first = digests_of("phalanx", unasked, REPLICAS, "--steps", steps, "--replicas", 0)
        later = train_changed(unasked, steps, UNASKED, 0)
        rows += [
            _row(
                f"{case}, none asked for",
                [first[case], later[case]],
                [each[case] for each in ddp],
                "4 and 4 > 3 > 1 ranks",
            )
            for case in unasked
        ]
    return rows


def _row(case: str, ours: Sequence[str], ddp: Sequence[str], what: str) -> Row:
    count, others = float(len(set(ours))), float(len(set(ddp)))
    ratio = count / others
    return Row(
        case=f"{case} torch DDP",
        unit=f"different weights on {what}",
        better="lower",
        ours=count,
        peer=others,
        peer_name="torch DDP under torchrun, on 1, 2, 3, 4 ranks",
        ratio={"median": ratio, "min": ratio, "max": ratio},
    )


def compare_cost(case: str, steps: int, pairs: int) -> Row:
    """Compare the seconds of an update of 2 replicas on 2 ranks with those of no replicas."""
    name = case.removeprefix("cost ")

    def seconds(replicas: int) -> float:
        warm = max(2, steps // 10)
        options = ("--steps", steps + warm, "--warm", warm, "--replicas", replicas)
        return float(train("phalanx", [name], 2, *options)[name]["seconds"])

    return measure_pairs(
        f"{case} without replicas",
        lambda: seconds(2),
        lambda: seconds(0),
        pairs=pairs,
        unit="s/update",
        better="lower",
        peer_name="the same without replicas",
    )


def main() -> None:
    """Run the cases asked for."""
    asked = arguments([*CASES, *TIMED])
    cases = [case for case in asked.cases if case in CASES]
    rows = count_digests(cases, 6 if asked.quick else 200) if cases else []
    for case in (case for case in asked.cases if case in TIMED):
        rows.append(compare_cost(case, 4 if asked.quick else TIMED[case], 1 if asked.quick else 5))
    show("bench_replicas", rows, as_json=asked.json)


if __name__ == "__main__":
    main()
