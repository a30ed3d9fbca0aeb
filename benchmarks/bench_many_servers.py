"""Jobs of many servers and many light workers on one machine, beside the same workers on one server.

    python -m benchmarks.bench_many_servers [--quick] [--json] [--cases 4x32,16x256] [--tables 26] [--keys 500]

A case is servers x workers. A step pulls and pushes distinct ids of each table, rows of 16 values, over Unix sockets
and shared memory, in mode `async`. Servers are processes without logs; workers share two processes, and train no model.
Each case prints three rows: requests a second of all workers, a pull and a push being two however many servers they
go to; and the processor time of a step, that of its worker and that of all servers.
"""

from __future__ import annotations

import argparse
import secrets
import time
from contextlib import ExitStack, closing

from benchmarks.report import Row, add_arguments, check_cases, row_of_pairs, show
from benchmarks.server_process import ServerProcess
from benchmarks.worker_process import WorkerJob, WorkerProcess

CASES = tuple(f"{servers}x{workers}" for workers in (2, 32, 256) for servers in (2, 4, 16))
FIGURES = {"requests": ("requests/s", "higher"), "worker": ("ms", "lower"), "servers": ("ms", "lower")}
"""Unit of each figure, and which is better."""

PROCESSES = 2
Figures = dict[str, float]


class Job:
    """Servers and workers."""

    def __init__(self, servers: int, workers: int, asked: argparse.Namespace, stack: ExitStack) -> None:
        secret = secrets.token_bytes(32)
        self._servers = [
            stack.enter_context(closing(ServerProcess(secret, rank=rank, servers=servers))) for rank in range(servers)
        ]
        endpoints = [server.endpoint for server in self._servers]
        job = WorkerJob(endpoints=endpoints, secret=secret, workers=workers, tables=asked.tables, keys=asked.keys)
        self._workers = workers
        self._processes = [
            stack.enter_context(closing(WorkerProcess(job, range(part, workers, PROCESSES))))
            for part in range(min(PROCESSES, workers))
        ]

    def step(self, total: int) -> Figures:
        """Take so many steps, spread over the workers; return each figure."""
        steps = max(1, total // self._workers)
        taken = steps * self._workers
        before, started = self._server_seconds(), time.perf_counter()
        for process in self._processes:
            process.start(steps)
        of_workers = sum(process.wait() for process in self._processes)
        seconds, of_servers = time.perf_counter() - started, self._server_seconds() - before
        return {
            "requests": 2 * taken / seconds,
            "worker": of_workers / taken * 1e3,
            "servers": of_servers / taken * 1e3,
        }

    def _server_seconds(self) -> float:
        return sum(server.cpu_seconds for server in self._servers)


def measure(case: str, asked: argparse.Namespace) -> list[Row]:
    """Measure one number of servers beside one server."""
    servers, workers = map(int, case.split("x"))
    steps, pairs = (workers, 1) if asked.quick else (512, 3)
    with ExitStack() as stack:
        many, one = Job(servers, workers, asked, stack), Job(1, workers, asked, stack)
        for job in (many, one):
            job.step(steps)
        figures: list[tuple[Figures, Figures]] = []
        for pair in range(pairs):
            first, second = (many, one) if pair % 2 == 0 else (one, many)
            of = {first: first.step(steps), second: second.step(steps)}
            figures.append((of[many], of[one]))
    return [_row(f"{case} {name}", name, figures) for name in FIGURES]


def _row(case: str, name: str, figures: list[tuple[Figures, Figures]]) -> Row:
    unit, better = FIGURES[name]
    pairs = [(many[name], one[name]) for many, one in figures]
    return row_of_pairs(case, pairs, unit=unit, better=better, peer_name="one server")


def main() -> None:
    """Run the cases asked for."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser, CASES)
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--keys", type=int, default=500, help="ids of each table in a step")
    asked = parser.parse_args()
    check_cases(parser, asked, CASES)
    rows = [row for case in asked.cases for row in measure(case, asked)]
    show("bench_many_servers", rows, as_json=asked.json)


if __name__ == "__main__":
    main()
