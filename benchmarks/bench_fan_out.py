"""Processor time that a worker spends on a step with many servers, beside one.

    python -m benchmarks.bench_fan_out [--quick] [--json] [--tables 26] [--keys 500] [--servers 16]

A step pulls and pushes distinct ids of each table, rows of 16 values, over Unix sockets and shared memory, in mode
`async`. Servers are processes without logs; what counts is the worker's own processor time, the system's for it
included. The worker takes steps with many servers and with one in turn.
"""

from __future__ import annotations

import argparse
import secrets
import time
from contextlib import ExitStack, closing

from benchmarks.report import Row, add_arguments, check_cases, row_of_pairs, show
from benchmarks.server_process import ServerProcess
from benchmarks.worker_process import BATCHES, LightWorker, WorkerJob

CASES = ("pull", "push")


class Job:
    """Servers, and the only worker."""

    def __init__(self, servers: int, tables: int, keys: int, stack: ExitStack) -> None:
        secret = secrets.token_bytes(32)
        started = [
            stack.enter_context(closing(ServerProcess(secret, rank=rank, servers=servers))) for rank in range(servers)
        ]
        endpoints = [server.endpoint for server in started]
        job = WorkerJob(endpoints=endpoints, secret=secret, workers=1, tables=tables, keys=keys)
        self._worker = stack.enter_context(closing(LightWorker(job, 0)))

    def cpu_us(self, steps: int) -> dict[str, float]:
        """Take steps; return the processor time of a pull and of a push, in microseconds."""
        spent = dict.fromkeys(CASES, 0.0)
        for _ in range(steps):
            before = time.process_time()
            self._worker.pull()
            between = time.process_time()
            self._worker.push()
            self._worker.flush()
            spent["pull"] += between - before
            spent["push"] += time.process_time() - between
        return {case: seconds / steps * 1e6 for case, seconds in spent.items()}


def measure(asked: argparse.Namespace) -> list[Row]:
    """Measure a pull, a push and both."""
    steps, pairs = (5, 1) if asked.quick else (200, 5)
    with ExitStack() as stack:
        many = Job(asked.servers, asked.tables, asked.keys, stack)
        one = Job(1, asked.tables, asked.keys, stack)
        for job in (many, one):
            job.cpu_us(2 * BATCHES)
        pairs_of_cases = []
        for pair in range(pairs):
            first, second = (many, one) if pair % 2 == 0 else (one, many)
            spent = {first: first.cpu_us(steps), second: second.cpu_us(steps)}
            pairs_of_cases.append((spent[many], spent[one]))
    return [_row(case, asked, pairs_of_cases) for case in (*asked.cases, "step")]


def _row(case: str, asked: argparse.Namespace, pairs: list[tuple[dict[str, float], dict[str, float]]]) -> Row:
    """Return the row of a case; a step is a pull and a push."""

    def spent(of_job: dict[str, float]) -> float:
        return sum(of_job.values()) if case == "step" else of_job[case]

    name = f"{case} {asked.tables} x {asked.keys} on {asked.servers} servers"
    both = [(spent(many), spent(one)) for many, one in pairs]
    return row_of_pairs(name, both, unit="us", better="lower", peer_name="one server")


def main() -> None:
    """Run the cases asked for."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser, CASES)
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--keys", type=int, default=500, help="ids of each table in a step")
    parser.add_argument("--servers", type=int, default=16)
    asked = parser.parse_args()
    check_cases(parser, asked, CASES)
    show("bench_fan_out", measure(asked), as_json=asked.json)


if __name__ == "__main__":
    main()
