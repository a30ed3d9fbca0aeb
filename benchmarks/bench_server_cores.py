"""Pushes a second of one parameter server whose clients push at once, on two threads beside one.

    python -m benchmarks.bench_server_cores [--quick] [--json] [--cases "13000 keys,13000 keys with log"]

A case is the server's engine alone, in one process and without sockets: each thread is one client that pushes rows of
16 values to one table with Adagrad, in mode `async`. The ratio says how far a second core helps.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.engine_client import EngineClient, push_part
from benchmarks.report import arguments, measure_pairs, show
from phalanx.ps.server.recovery import Recovery
from phalanx.ps.server.service import Service
from phalanx.ps.server.snapshots.snapshot_service import SnapshotService
from phalanx.ps.stores.update import TableUpdate
from phalanx.ps.table.rules import TableSpec
from phalanx.ps.table.update_rules import Adagrad
from phalanx.ps.wire.message import RpcRequest

DIM = 16
ROWS = 2_000_000
CASES = {"16 keys": (16, False), "13000 keys": (13_000, False), "13000 keys with log": (13_000, True)}


def pushes_a_second(clients: int, keys: int, has_log: bool, seconds: float) -> float:
    """Let so many threads push for so long; return their pushes a second together."""
    with tempfile.TemporaryDirectory() as folder:
        service = Service()
        if has_log:
            Recovery(service, SnapshotService(service), Path(folder)).recover("bench")
        spec = TableSpec("rows", DIM, Adagrad(lr=0.1))
        for client in range(clients):
            meta = {"mode": "async", "workers": clients, "worker": client, "specs": [spec.to_json()]}
            service.handle(RpcRequest("declare", meta, [], client=client + 1, seq=1, peer=f"worker {client}"))
        counts = [0] * clients
        together = threading.Barrier(clients)
        threads = [
            threading.Thread(target=_push, args=(service, client, keys, seconds, together, counts))
            for client in range(clients)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(counts) / seconds


def _push(
    service: Service, client: int, keys: int, seconds: float, together: threading.Barrier, counts: list[int]
) -> None:
    draw = np.random.default_rng(client)
    values = np.ones((keys, DIM), np.float32)
    pushes = [push_part(TableUpdate("rows", draw.permutation(ROWS)[:keys], values)) for _ in range(8)]
    worker = EngineClient(service, client + 1)
    together.wait()
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        worker.push(pushes[worker.step % len(pushes)])
    counts[client] = worker.step


def main() -> None:
    """Run the cases asked for."""
    asked = arguments(list(CASES))
    seconds, pairs = (0.2, 1) if asked.quick else (3.0, 5)
    rows = []
    for case in asked.cases:
        keys, has_log = CASES[case]
        run: Callable[[int], float] = partial(pushes_a_second, keys=keys, has_log=has_log, seconds=seconds)
        rows.append(
            measure_pairs(
                case,
                partial(run, 2),
                partial(run, 1),
                pairs=pairs,
                unit="pushes/s",
                better="higher",
                peer_name="one thread",
            )
        )
    show("bench_server_cores", rows, as_json=asked.json)


if __name__ == "__main__":
    main()
