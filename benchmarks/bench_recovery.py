"""A server with many rows is killed and recovers while its worker waits: how long that takes, and whether all is there.

    python -m benchmarks.bench_recovery [--quick] [--json] [--base] [--rows 68000000] [--dim 8] [--folder DIR]

The server is a process that keeps its state in `--folder`; this process is its worker, in mode `async`, and fills a
table with Adagrad. After SIGKILL another process takes its place, as the launcher would start it. The worker's next
step finds the server gone, waits, says so, and continues by itself. All rows are pulled before and after, and compared
by checksum. The server recovers from its log, or with `--base` from a base snapshot, which it writes before.
"""

from __future__ import annotations

import argparse
import json
import logging
import secrets
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.report import machine
from benchmarks.server_process import ServerProcess
from phalanx.ps.stores.base import Keys, PullSpec, Rows
from phalanx.ps.stores.remote import RemoteStore
from phalanx.ps.stores.update import TableUpdate
from phalanx.ps.table.rules import TableSpec
from phalanx.ps.table.update_rules import Adagrad

TABLE = "rows"
CHUNK = 1 << 18
RETRY_S = 60.0
"""How long a worker asks for a server that does not come at all."""


class Worker:
    """Trains a table whose ids are 0, 1, ..."""

    def __init__(self, endpoint: str, secret: bytes, rows: int, dim: int) -> None:
        self.store = RemoteStore([endpoint], secret=secret, worker=0, workers=1, mode="async", retry_s=RETRY_S)
        self.store.declare([TableSpec(TABLE, dim, Adagrad(0.05))])
        self._rows, self._step = rows, 0
        self.gradients = np.random.default_rng(0).normal(size=(CHUNK, dim)).astype(np.float32)

    def chunks(self) -> Iterator[Keys]:
        """Return all ids, some at a time."""
        for first in range(0, self._rows, CHUNK):
            yield np.arange(first, min(first + CHUNK, self._rows))

    def push(self, keys: Keys) -> None:
        """Push a gradient for each id."""
        self.store.push([TableUpdate(TABLE, keys, self.gradients[: len(keys)])], step=self._step)
        self._step += 1

    def pull(self, keys: Keys) -> Rows:
        """Return rows, behind all pushes so far."""
        (rows,) = self.store.pull([PullSpec(TABLE, keys)], step=self._step).rows()
        return rows

    def checksums(self) -> list[int]:
        """Return a checksum of the rows of each chunk."""
        return [zlib.crc32(self.pull(keys)) for keys in self.chunks()]


class Waits(logging.Handler):
    """Keeps what the worker says while it waits."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        logger = logging.getLogger("phalanx.ps.wire")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self.lines.append(record.getMessage())


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was measured."""

    rows: int
    fill_s: float
    memory_bytes: int
    base_bytes: int
    log_bytes: int
    recovery_s: float
    """From the kill to the answer of the step that waited."""

    different_chunks: int
    """Of those whose rows are not what they were before the kill."""

    rows_after: int
    is_once: bool
    """Whether the push that was on its way at the kill is in its rows once."""

    messages: list[str]


def measure(rows: int, dim: int, folder: Path, *, has_base: bool) -> Outcome:
    """Fill, kill, recover, compare."""
    secret = secrets.token_bytes(32)
    waits = Waits()
    with closing(ServerProcess(secret, folder)) as server:
        worker = Worker(server.endpoint, secret, rows, dim)
        with closing(worker.store):
            started = time.perf_counter()
            for keys in worker.chunks():
                worker.push(keys)
            worker.store.flush()
            fill_s = time.perf_counter() - started
            if has_base:
                server.restart_from_base()
            before = worker.checksums()
            memory, (base, log) = server.resident_bytes, _sizes(folder)
            first = next(worker.chunks())
            expected = _stepped_twice(worker, first, dim)
            killed = time.perf_counter()
            worker.push(first)
            server.close()
            server.start()
            trained = worker.pull(first)
            recovery_s = time.perf_counter() - killed
            after = worker.checksums()
            different = sum(then != now for then, now in zip(before[1:], after[1:], strict=True))
            is_once = bool(np.allclose(trained, expected, rtol=1e-5, atol=1e-7))
            rows_after = worker.store.report()[TABLE].rows
    return Outcome(rows, fill_s, memory, base, log, recovery_s, different, rows_after, is_once, waits.lines)


def _stepped_twice(worker: Worker, keys: Keys, dim: int) -> Rows:
    """Return the rows of ids after their second gradient, by Adagrad's rule."""
    gradients = worker.gradients[: len(keys)]
    rule = Adagrad(0.05)
    return worker.pull(keys) - np.float32(rule.lr) * gradients / (np.sqrt(2 * gradients**2) + np.float32(rule.eps))


def _sizes(folder: Path) -> tuple[int, int]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    base = sum(path.stat().st_size for path in files if "base-" in path.parent.name)
    return base, sum(path.stat().st_size for path in files if path.name.startswith("log-"))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    parser.add_argument("--quick", action="store_true", help="toy size, only to see that it works")
    parser.add_argument("--base", action="store_true", help="have the server write a base snapshot before it is killed")
    parser.add_argument("--rows", type=int, help="68,000,000 when omitted, with --quick 1,000,000")
    parser.add_argument("--dim", type=int, default=8)
    parser.add_argument("--folder", type=Path, help="where the state goes; one for temporary files when omitted")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        rows = asked.rows or (1_000_000 if asked.quick else 68_000_000)
        outcome = measure(rows, asked.dim, Path(folder), has_base=asked.base)
    if asked.json:
        print(json.dumps({"bench": "bench_recovery", "machine": machine(), **asdict(outcome)}))
    else:
        _show(outcome)
    if outcome.different_chunks or outcome.rows_after != outcome.rows or not outcome.is_once:
        raise SystemExit("rows are not what they were")


def _show(outcome: Outcome) -> None:
    gib, base, log = outcome.memory_bytes / 2**30, outcome.base_bytes / 1e9, outcome.log_bytes / 1e9
    print(f"{outcome.rows:,} rows pushed in {outcome.fill_s:.1f} s, {gib:.1f} GiB of memory,")
    print(f"  a base of {base:.2f} GB and a log of {log:.2f} GB when it was killed")
    print(
        f"the worker's step took {outcome.recovery_s:.1f} s, then it continued; {outcome.rows_after:,} rows are there,"
    )
    print(f"  {outcome.different_chunks} chunks differ; the push on its way is there once: {outcome.is_once}")
    print(*outcome.messages, sep="\n")


if __name__ == "__main__":
    main()
