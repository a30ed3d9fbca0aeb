"""Rows/s of reading click logs in Criteo's format: the native parser against Python's csv reader and NumPy.

criteo    label, 13 numbers, 26 slots hashed to 64 bits: text in memory to arrays
stream    a file through `QueueDataset`, batches of 512 tensors

The peer does the least that gives a model the same inputs: csv rows, float() and Python's hash() of (slot, text).
"""

from __future__ import annotations

import csv
import io
import random
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.report import Row, arguments, measure_pairs, show
from phalanx.data.ctr.queue_dataset import QueueDataset
from phalanx.data.ctr.slots import criteo_schema, parse_slots

CASES = ("criteo", "stream")
PEER = "Python csv + NumPy"


def text_of(rows: int) -> str:
    """Return rows as long as those of the real logs; one number in eight is missing."""
    draw = random.Random(0)

    def line() -> str:
        numbers = ("" if draw.random() < 0.125 else str(draw.randint(0, 500)) for _ in range(13))
        return "\t".join([str(draw.randint(0, 1)), *numbers, *(f"{draw.getrandbits(32):08x}" for _ in range(26))])

    return "\n".join(line() for _ in range(rows)) + "\n"


def peer(text: str, rows: int) -> float:
    """Return the peer's rows per second."""
    started = time.perf_counter()
    label, dense, ids = [], [], []
    for fields in csv.reader(io.StringIO(text), delimiter="\t"):
        label.append(float(fields[0]))
        dense.append([float(field or 0) for field in fields[1:14]])
        ids.append([hash((slot, field)) for slot, field in enumerate(fields[14:])])
    arrays = np.array(label, np.float32), np.array(dense, np.float32), np.array(ids, np.int64)
    assert len(arrays[0]) == rows
    return rows / (time.perf_counter() - started)


def parsed(text: bytes, rows: int) -> float:
    """Return the native parser's rows per second."""
    started = time.perf_counter()
    assert len(parse_slots(text, criteo_schema()).rows) == rows
    return rows / (time.perf_counter() - started)


def streamed(path: Path, rows: int) -> float:
    """Return the rows per second of reading a file as batches, the start of the thread included."""
    started = time.perf_counter()
    assert sum(len(label) for _, _, label in QueueDataset(path, criteo_schema(), batch_size=512)) == rows
    return rows / (time.perf_counter() - started)


def measure(case: str, *, quick: bool) -> Row:
    """Measure one case on both sides in turn."""
    rows = 500 if quick else 50_000
    text = text_of(rows)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "part-0"
        path.write_text(text)
        encoded = text.encode()
        return measure_pairs(
            case,
            (lambda: parsed(encoded, rows)) if case == "criteo" else (lambda: streamed(path, rows)),
            lambda: peer(text, rows),
            pairs=1 if quick else 7,
            unit="rows/s",
            better="higher",
            peer_name=PEER,
        )


def main() -> None:
    """Measure the chosen cases and print them."""
    args = arguments(CASES)
    show("bench_slots", [measure(case, quick=args.quick) for case in args.cases], as_json=args.json)


if __name__ == "__main__":
    main()
