"""What a save costs a parameter server that trains meanwhile: times of pushes, speed, and memory.

    python -m benchmarks.bench_save [--quick] [--json] [--rows 4000000] [--keys 13000] [--saves 3]

A server's engine in one process and without sockets. One thread pushes rows of 16 values, random ids in each push, to a
table with Adagrad, as fast as it can; another one saves to a temporary folder, which the page cache takes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engine_client import EngineClient, push_part
from benchmarks.report import machine
from phalanx.ps.server.service import Service
from phalanx.ps.server.snapshots.snapshot_service import SnapshotService
from phalanx.ps.stores.update import TableUpdate
from phalanx.ps.table.rules import TableSpec
from phalanx.ps.table.update_rules import Adagrad
from phalanx.ps.wire.message import RpcRequest

DIM = 16
CALM_S = 5.0


class Server:
    """A server with one table, one worker that pushes, and one client that saves."""

    def __init__(self, rows: int, keys: int) -> None:
        self._service = Service()
        self._snapshots = SnapshotService(self._service)
        self._worker = EngineClient(self._service, 1)
        self._rows, self._keys = rows, keys
        self._draw = np.random.default_rng(0)
        self._values = np.ones((keys, DIM), np.float32)
        specs = [TableSpec("rows", DIM, Adagrad(lr=0.1)).to_json()]
        self._call("declare", {"mode": "async", "workers": 1, "worker": 0, "specs": specs}, client=1)
        for first in range(0, rows, 1 << 16):
            self._push(np.arange(first, min(first + (1 << 16), rows)))

    def push(self) -> float:
        """Push random ids; returns the seconds it took."""
        return self._push(np.unique(self._draw.integers(0, self._rows, self._keys)))

    def save(self, folder: Path, number: int) -> float:
        """Write a snapshot; returns the gigabytes written."""
        save, started = {"token": f"{number:08x}", "save": f"{number:08x}"}, time.perf_counter()
        self._call("freeze", {**save, "seconds": 10.0})
        self._call("snapshot", {**save, "directory": str(folder), "mode": "full"})
        self._call("resume", save)
        self.held_s = time.perf_counter() - started
        while not (reply := self._call("saved", {**save, "wait_s": 5.0}))["done"]:
            pass
        return float(reply["result"]["bytes"]) / 1e9

    def _push(self, ids: np.ndarray[Any, Any]) -> float:
        values = self._values if len(ids) <= len(self._values) else np.ones((len(ids), DIM), np.float32)
        push = push_part(TableUpdate("rows", ids, values[: len(ids)]))
        started = time.perf_counter()
        self._worker.push(push)
        return time.perf_counter() - started

    def _call(self, op: str, meta: dict[str, Any], client: int = 2) -> dict[str, Any]:
        return dict(self._service.handle(RpcRequest(op, meta, [], client=client, seq=1, peer="bench")).meta)


def push_times(server: Server, is_over: Callable[[], bool]) -> Iterator[tuple[float, int]]:
    """Push until it is over; yields the seconds of each push and the memory of the process after it, in bytes."""
    while not is_over():
        yield server.push(), _resident_bytes()


def measure(rows: int, keys: int, saves: int, calm_s: float) -> dict[str, Any]:
    """Return times of pushes without and during saves in ms, and what the saves took."""
    # The thread that pushes waits for Python's lock, as no push to a server does, but for a short time only.
    sys.setswitchinterval(1e-4)
    server = Server(rows, keys)
    calm: list[float] = []
    busy: list[float] = []
    speeds, held, extra = [], [], []
    for number in range(saves):
        until = time.perf_counter() + calm_s
        calm += [seconds for seconds, _ in push_times(server, lambda until=until: time.perf_counter() > until)]
        before = _resident_bytes()
        with tempfile.TemporaryDirectory() as folder:
            written: list[float] = []

            def save(folder: str = folder, number: int = number, written: list[float] = written) -> None:
                written.append(server.save(Path(folder), number))

            saver = threading.Thread(target=save)
            started = time.perf_counter()
            saver.start()
            during = list(push_times(server, lambda saver=saver: not saver.is_alive()))
            saver.join()
        busy += [seconds for seconds, _ in during]
        speeds.append(written[0] / (time.perf_counter() - started))
        held.append(server.held_s * 1e3)
        extra.append(max(memory for _, memory in during) - before)
    return {
        "pushes": [len(calm), len(busy)],
        "calm_ms": _percentiles(calm),
        "save_ms": _percentiles(busy),
        "gigabytes_s": speeds,
        "held_ms": held,
        "extra_mib": [memory / 2**20 for memory in extra],
    }


def _percentiles(seconds: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(seconds, [50, 99]) * 1e3
    return {"p50": float(p50), "p99": float(p99)}


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    parser.add_argument("--quick", action="store_true", help="toy size, only to see that it works")
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--keys", type=int, default=13_000, help="random ids of a push")
    parser.add_argument("--saves", type=int, default=3)
    asked = parser.parse_args()
    if asked.quick:
        asked.rows, asked.keys, asked.saves = 20_000, 1000, 1
    result = measure(asked.rows, asked.keys, asked.saves, 0.2 if asked.quick else CALM_S)
    if asked.json:
        print(json.dumps({"bench": "bench_save", "machine": machine(), **result}))
        return
    calm, busy = result["calm_ms"], result["save_ms"]
    print(f"a push of {asked.keys} of {asked.rows} rows, p50/p99 ms: {calm['p50']:.2f}/{calm['p99']:.2f} calm,")
    print(f"  {busy['p50']:.2f}/{busy['p99']:.2f} during a save; ratio of p99 {busy['p99'] / calm['p99']:.2f}")
    print("written, GB/s:", *(f"{speed:.2f}" for speed in result["gigabytes_s"]))
    print("changes held back, ms:", *(f"{ms:.1f}" for ms in result["held_ms"]))
    print("more memory during a save, MiB:", *(f"{memory:.0f}" for memory in result["extra_mib"]))


if __name__ == "__main__":
    main()
