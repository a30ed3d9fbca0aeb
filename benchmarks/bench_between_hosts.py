"""What TLS costs a parameter server and its worker: a pull and a push over TLS beside plain TCP, both on loopback.

    python -m benchmarks.bench_between_hosts [--quick] [--json] [--cases "one table float32,26 tables bfloat16"]

A step pulls rows of 16 values and pushes gradients of the same keys (Adagrad, mode `async`): 13,000 keys of one table,
or 500 of each of 26; "bfloat16" sends both as such. Server and worker are processes of this machine; figures are
their processor time per step, the system's for them included. On one host they would use a Unix socket and shared
memory; here both sides use TCP on loopback, ours with TLS and the peer without.
"""

from __future__ import annotations

import multiprocessing
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from multiprocessing.connection import Connection as Pipe
from typing import NamedTuple
from unittest.mock import patch

from benchmarks.report import Row, arguments, row_of_pairs, show
from benchmarks.worker_process import BATCHES, LightWorker, WorkerJob
from phalanx.ps.server.service import Service
from phalanx.ps.wire.address import Address
from phalanx.ps.wire.client import dial
from phalanx.ps.wire.data_frame import ValueType
from phalanx.ps.wire.server.listener import Listener

SECRET = bytes(range(32))
CASES: dict[str, tuple[int, int, ValueType]] = {
    "one table float32": (1, 13_000, "float32"),
    "one table bfloat16": (1, 13_000, "bfloat16"),
    "26 tables float32": (26, 500, "float32"),
    "26 tables bfloat16": (26, 500, "bfloat16"),
}


class StepCost(NamedTuple):
    """Means over steps."""

    server_ms: float
    worker_ms: float
    steps_per_s: float


METRICS = (("server CPU", "ms", "lower"), ("worker CPU", "ms", "lower"), ("steps", "1/s", "higher"))


@contextmanager
def as_network(*, is_private: bool) -> Iterator[None]:
    """Treat loopback as a network between two hosts, or as one that needs no encryption."""

    def connect(to: Address, deadline: float) -> socket.socket:
        return dial._open_socket(to.family, (to.host, to.port), deadline)

    private = patch("phalanx.ps.wire.address.is_private", lambda server: is_private)
    with private, patch("phalanx.ps.wire.client.dial._connect", connect):
        yield


def serve(pipe: Pipe, is_private: bool) -> None:
    """Serve, and say for each message what processor time was used so far; until the pipe ends."""
    with as_network(is_private=is_private):
        service = Service()
        listener = Listener(
            "127.0.0.1:0",
            secret=SECRET,
            me="server 0",
            handler=service.handle,
            data_handler=service.engine,
            opened=service.connected,
            closed=service.disconnected,
        )
        thread = threading.Thread(target=listener.serve)
        thread.start()
        pipe.send(listener.endpoint)
        try:
            while True:
                pipe.recv()
                pipe.send(time.process_time())
        except EOFError:
            service.stop()
            listener.stop()
            thread.join()


class Worker:
    """A worker of this process with a server in another."""

    def __init__(self, stack: ExitStack, *, is_private: bool, tables: int, keys: int, wire_dtype: ValueType) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, far = context.Pipe()
        process = context.Process(target=serve, args=(far, is_private))
        process.start()
        far.close()
        stack.callback(process.join)
        stack.callback(self._pipe.close)
        with as_network(is_private=is_private):
            endpoint = self._pipe.recv()
            job = WorkerJob(
                endpoints=[endpoint],
                secret=SECRET,
                workers=1,
                tables=tables,
                keys=keys,
                rows=200_000,
                wire_dtype=wire_dtype,
            )
            self._worker = stack.enter_context(closing(LightWorker(job, 0)))
        self.measure(BATCHES)  # makes all rows

    def measure(self, steps: int) -> StepCost:
        """Take steps and return what they cost."""
        server, worker, started = self._server_s(), time.process_time(), time.perf_counter()
        for _ in range(steps):
            self._worker.pull()
            self._worker.push()
            self._worker.flush()
        seconds = time.perf_counter() - started
        worker = time.process_time() - worker
        return StepCost(1e3 * (self._server_s() - server) / steps, 1e3 * worker / steps, steps / seconds)

    def _server_s(self) -> float:
        self._pipe.send(None)
        return float(self._pipe.recv())


def measure(case: str, *, quick: bool) -> list[Row]:
    """Measure a case in interleaved pairs."""
    tables, keys, wire_dtype = CASES[case]
    steps, pairs = (5, 1) if quick else (300, 7)
    with ExitStack() as stack:
        tls, plain = (
            Worker(stack, is_private=is_private, tables=tables, keys=keys, wire_dtype=wire_dtype)
            for is_private in (False, True)
        )
        costs: list[tuple[StepCost, StepCost]] = []
        for index in range(pairs):
            first, second = (plain, tls) if index % 2 else (tls, plain)
            pair = first.measure(steps), second.measure(steps)
            costs.append((pair[1], pair[0]) if index % 2 else pair)
    return [
        row_of_pairs(
            f"{case}, {name}",
            [(ours[index], peer[index]) for ours, peer in costs],
            unit=unit,
            better=better,
            peer_name="plain TCP",
        )
        for index, (name, unit, better) in enumerate(METRICS)
    ]


def main() -> None:
    """Run the cases asked for."""
    asked = arguments(list(CASES))
    rows = [row for case in asked.cases for row in measure(case, quick=asked.quick)]
    show("bench_between_hosts", rows, as_json=asked.json)


if __name__ == "__main__":
    main()
