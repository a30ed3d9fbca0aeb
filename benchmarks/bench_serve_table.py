"""How soon a push can be read from `phalanx serve-table --follow`, and how many requests a second it answers.

    python -m benchmarks.bench_serve_table [--quick] [--json] [--cases "readable p50,readable p99,bytes"]

One server with a log, one worker that pushes 13,000 rows of 16 values back to back (Adagrad, mode `async`), one reader
with one HTTP connection, all on this machine. "readable" is the time from the start of a push until a request answers
with its row; the peer pulls the row from the server itself. "bytes" is requests of 200 ids a second in the
compact form, its peer the same as JSON, both while nobody pushes.
"""

from __future__ import annotations

import http.client
import json
import multiprocessing
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.report import Row, arguments, measure_pairs, show
from phalanx.cluster.role.role import Role
from phalanx.ps.stores.base import PullSpec
from phalanx.ps.stores.remote import RemoteStore
from phalanx.ps.stores.update import TableUpdate
from phalanx.ps.table.rules import TableSpec
from phalanx.ps.table.update_rules import Adagrad

DIM, KEYS, ROWS, ASKED = 16, 13_000, 200_000, 200
MARK = -1
SECRET = bytes(range(32))
BYTES = "application/octet-stream"


def serve(endpoint: str, folder: str) -> None:
    """Run the server in its process."""
    from phalanx.ps.server.main import run

    run(Role(kind="server", rank=0, world_size=1, endpoint=endpoint, job_id="bench"), secret=SECRET, directory=folder)


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Run `phalanx serve-table --follow`; gives its host and port."""
    log = folder / "serve-table.log"
    with log.open("w") as output:
        command = [sys.executable, "-m", "phalanx", "serve-table", str(folder / "0"), "--follow"]
        process = subprocess.Popen(command, stderr=output)
    try:
        while "http://" not in log.read_text():
            if process.poll() is not None:
                raise RuntimeError(log.read_text())
            time.sleep(0.05)
        yield log.read_text().partition("http://")[2].partition("/")[0]
    finally:
        process.terminate()
        process.wait()


class Reader:
    """One connection that asks for rows."""

    def __init__(self, address: str) -> None:
        self._connection = http.client.HTTPConnection(address)

    def read_bytes(self, ids: np.ndarray) -> np.ndarray:
        """Return rows, asked for and answered as bytes."""
        body = self._ask(ids.tobytes(), {"Content-Type": BYTES, "Accept": BYTES})
        return np.frombuffer(body, np.float32).reshape(len(ids), DIM)

    def read_json(self, ids: np.ndarray) -> np.ndarray:
        """Return rows, asked for and answered as JSON."""
        return np.array(json.loads(self._ask(json.dumps({"ids": ids.tolist()}).encode(), {}))["rows"], np.float32)

    def _ask(self, body: bytes, headers: dict[str, str]) -> bytes:
        self._connection.request("POST", "/v1/tables/rows/rows", body, headers)
        answer = self._connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise RuntimeError(content)
        return content


class Worker:
    """Pushes to the server, each push with a row whose value says which it is."""

    def __init__(self, endpoint: str) -> None:
        self.store = RemoteStore([endpoint], secret=SECRET, worker=0, workers=1, mode="async", timeout_s=60.0)
        self.store.declare([TableSpec("rows", DIM, Adagrad(lr=0.1))])
        self.step = 0
        self._draw = np.random.default_rng(0)
        self._values = np.ones((KEYS, DIM), np.float32)

    def push(self) -> float:
        """Push, and return the value that marks it."""
        self.step += 1
        mark = np.array([MARK]), np.full((1, DIM), self.step, np.float32)
        ids = self._draw.permutation(ROWS)[:KEYS]
        updates = [TableUpdate("rows", ids, self._values), TableUpdate("rows", *mark, kind="assign")]
        self.store.push(updates, step=self.step - 1)
        return float(self.step)

    def pull_mark(self) -> float:
        """Return the value of the newest push from the server itself."""
        return float(self.store.pull([PullSpec("rows", np.array([MARK]))], step=self.step).rows()[0][0, 0])


def delays_ms(worker: Worker, look: Callable[[], float], pushes: int) -> list[float]:
    """Return how long after the start of each push `look` gives its value, in milliseconds."""
    delays = []
    for _ in range(pushes):
        started = time.perf_counter()
        value = worker.push()
        while look() < value:
            pass
        delays.append(1000 * (time.perf_counter() - started))
    return delays


def requests_a_second(ask: Callable[[np.ndarray], np.ndarray], seconds: float) -> float:
    """Ask for rows for so long."""
    ids = np.arange(ASKED)
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        ask(ids)
        count += 1
    return count / (time.perf_counter() - started)


def measure(case: str, worker: Worker, address: str, *, quick: bool) -> Row:
    """Measure one case, each time over a new connection: the server closes those that rest for 5 s."""
    pairs, pushes, seconds = (1, 10, 0.2) if quick else (5, 300, 3.0)
    if case == "bytes":
        return measure_pairs(
            f"requests of {ASKED} ids as bytes",
            lambda: requests_a_second(Reader(address).read_bytes, seconds),
            lambda: requests_a_second(Reader(address).read_json, seconds),
            pairs=pairs,
            unit="requests/s",
            better="higher",
            peer_name="JSON",
        )
    mark, percent = np.array([MARK]), int(case.removeprefix("readable p"))

    def look_at_copy() -> Callable[[], float]:
        reader = Reader(address)
        return lambda: float(reader.read_bytes(mark)[0, 0])

    def at_percent(look: Callable[[], float]) -> float:
        return statistics.quantiles(delays_ms(worker, look, pushes), n=100, method="inclusive")[percent - 1]

    return measure_pairs(
        f"push to {case}",
        lambda: at_percent(look_at_copy()),
        lambda: at_percent(worker.pull_mark),
        pairs=pairs,
        unit="ms",
        better="lower",
        peer_name="pull of the server",
    )


def main() -> None:
    """Run the cases asked for."""
    asked = arguments(["readable p50", "readable p99", "bytes"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(endpoint, f"{folder}/0"))
        process.start()
        try:
            worker = Worker(endpoint)
            with serving(Path(folder)) as address:
                reader = Reader(address)
                delays_ms(worker, lambda: float(reader.read_bytes(np.array([MARK]))[0, 0]), 20)
                rows = [measure(case, worker, address, quick=asked.quick) for case in asked.cases]
            worker.store.close()
        finally:
            process.kill()
            process.join()
    show("bench_serve_table", rows, as_json=asked.json)


if __name__ == "__main__":
    main()
