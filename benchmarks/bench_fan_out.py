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

import numpy as np

from benchmarks.report import Row, add_arguments, check_cases, measure_pairs, show
from benchmarks.server_process import ServerProcess
from phalanx.ps.stores.base import PullSpec
from phalanx.ps.stores.remote import RemoteStore
from phalanx.ps.stores.update import TableUpdate
from phalanx.ps.table.rules import TableSpec
from phalanx.ps.table.update_rules import Adagrad

CASES = ("pull", "push")
DIM = 16
IDS = 100_000
BATCHES = 8


class Job:
    """Servers, and the only worker."""

    def __init__(self, servers: int, tables: int, keys: int, stack: ExitStack) -> None:
        secret = secrets.token_bytes(32)
        started = [
            stack.enter_context(closing(ServerProcess(secret, rank=rank, servers=servers))) for rank in range(servers)
        ]
        endpoints = [server.endpoint for server in started]
        self._store = stack.enter_context(closing(RemoteStore(endpoints, secret=secret, worker=0, workers=1)))
        names = [f"table-{number}" for number in range(tables)]
        self._store.declare([TableSpec(name, DIM, Adagrad(0.05)) for name in names])
        draw = np.random.default_rng(0)
        gradients = draw.normal(size=(keys, DIM)).astype(np.float32)
        ids = [[draw.choice(IDS, keys, replace=False) for _ in names] for _ in range(BATCHES)]
        self._pulls = [[PullSpec(*named) for named in zip(names, batch, strict=True)] for batch in ids]
        self._pushes = [[TableUpdate(*named, gradients) for named in zip(names, batch, strict=True)] for batch in ids]
        self._step = 0

    def cpu_us(self, steps: int) -> dict[str, float]:
        """Take steps; return the processor time of a pull and of a push, in microseconds."""
        spent = dict.fromkeys(CASES, 0.0)
        for _ in range(steps):
            batch = self._step % BATCHES
            before = time.process_time()
            self._store.pull(self._pulls[batch], step=self._step).rows()
            between = time.process_time()
            self._store.push(self._pushes[batch], step=self._step)
            self._store.flush()
            spent["pull"] += between - before
            spent["push"] += time.process_time() - between
            self._step += 1
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

    many, one = iter([spent(job) for job, _ in pairs]), iter([spent(job) for _, job in pairs])
    name = f"{case} {asked.tables} x {asked.keys} on {asked.servers} servers"
    return measure_pairs(
        name, many.__next__, one.__next__, pairs=len(pairs), unit="us", better="lower", peer_name="one server"
    )


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
