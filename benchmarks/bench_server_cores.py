"""Pushes a second of one parameter server whose clients push at once, on two threads beside one.

    python -m benchmarks.bench_server_cores [--quick] [--json] [--cases "13000 keys,13000 keys with log"]

A case is a server's sessions in one process, which read frames and apply and answer them without Python's lock. Each
thread is one client that pushes rows of 16 values to one table of 2 M rows with Adagrad, in mode `async`. The ratio
says how far a second core helps. Cases `on 2 servers` have a server, and so a table, for each thread: what the machine
allows threads that share nothing.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.engine_client import EngineClient, PushPart, push_part
from benchmarks.report import arguments, measure_pairs, show
from benchmarks.session_client import SessionClient
from phalanx.ps.server.recovery import Recovery
from phalanx.ps.server.service import Service
from phalanx.ps.server.snapshots.snapshot_service import SnapshotService
from phalanx.ps.stores.update import TableUpdate
from phalanx.ps.table.rules import TableSpec
from phalanx.ps.table.update_rules import Adagrad
from phalanx.ps.wire.message import RpcRequest

DIM = 16
ROWS = 2_000_000
FILLED_AT_ONCE = 1 << 16
KEYS_OF_A_RUN = 30_000_000
MOST_PUSHES = 60_000
"""Of a thread: their frames are made before."""


class Case(NamedTuple):
    """What threads push."""

    keys: int
    has_log: bool = False
    has_own_servers: bool = False
    """Whether each thread has a server, and so a table, of its own."""


CASES = {
    **{f"{keys} keys": Case(keys) for keys in (16, 1000, 13_000)},
    **{f"{keys} keys on 2 servers": Case(keys, has_own_servers=True) for keys in (16, 1000, 13_000)},
    "13000 keys with log": Case(13_000, has_log=True),
}


def pushes_a_second(clients: int, case: Case, share: float) -> float:
    """Let so many threads push; return their pushes a second together."""
    with ExitStack() as stack:
        servers, keys = clients if case.has_own_servers else 1, case.keys
        services = [_service(stack, clients, has_log=case.has_log) for _ in range(servers)]
        pushes = max(64, int(share * min(MOST_PUSHES, KEYS_OF_A_RUN // keys)))
        workers = []
        for client in range(clients):
            worker = SessionClient(services[client % servers], client + 1)
            stack.callback(worker.close)
            workers.append((worker, worker.batches(_drawn(client, keys), pushes)))
        together = threading.Barrier(clients + 1)
        threads = [threading.Thread(target=_push, args=(*worker, together)) for worker in workers]
        for thread in threads:
            thread.start()
        together.wait()
        started = time.perf_counter()
        for thread in threads:
            thread.join()
        return clients * pushes / (time.perf_counter() - started)


def _service(stack: ExitStack, clients: int, *, has_log: bool) -> Service:
    """Return a server with all rows, and without a log unless one is asked for; the last client fills it."""
    service = Service()
    if has_log:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        Recovery(service, SnapshotService(service), Path(folder)).recover("bench")
    spec = TableSpec("rows", DIM, Adagrad(lr=0.1))
    filler = clients + 1
    for client in range(1, filler + 1):
        meta = {"mode": "async", "workers": filler, "worker": client - 1, "specs": [spec.to_json()]}
        service.handle(RpcRequest("declare", meta, [], client=client, seq=1, peer=f"worker {client - 1}"))
    worker = EngineClient(service, filler)
    values = np.zeros((FILLED_AT_ONCE, DIM), np.float32)
    for first in range(0, ROWS, FILLED_AT_ONCE):
        worker.push(push_part(TableUpdate("rows", np.arange(first, first + FILLED_AT_ONCE), values)))
    return service


def _drawn(client: int, keys: int) -> list[PushPart]:
    draw = np.random.default_rng(client)
    values = np.ones((keys, DIM), np.float32)
    return [push_part(TableUpdate("rows", draw.permutation(ROWS)[:keys], values)) for _ in range(8)]


def _push(worker: SessionClient, batches: list[bytes], together: threading.Barrier) -> None:
    together.wait()
    for batch in batches:
        worker.push(batch)


def main() -> None:
    """Run the cases asked for."""
    asked = arguments(list(CASES))
    share, pairs = (0.01, 1) if asked.quick else (1.0, 5)
    rows = []
    for case in asked.cases:
        run: Callable[[int], float] = partial(pushes_a_second, case=CASES[case], share=share)
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
