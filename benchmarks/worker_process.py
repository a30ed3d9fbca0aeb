"""`LightWorker`: pulls and pushes rows and trains no model; `WorkerProcess`: some of them in a process."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe

import numpy as np

from phalanx.ps.stores.base import PullSpec
from phalanx.ps.stores.remote import RemoteStore
from phalanx.ps.stores.update import TableUpdate
from phalanx.ps.table.rules import TableSpec
from phalanx.ps.table.update_rules import Adagrad
from phalanx.ps.wire.data_frame import ValueType

DIM, BATCHES = 16, 8
THREADS = 4
"""Threads of a process, each of which takes the steps of some workers in turn."""


@dataclass(frozen=True, kw_only=True)
class WorkerJob:
    """What workers of a job need to know."""

    endpoints: Sequence[str]
    secret: bytes
    workers: int
    tables: int
    keys: int
    """Ids of each table in a step."""

    rows: int = 100_000
    """Of each table, from which ids are drawn."""

    wire_dtype: ValueType = "float32"


class WorkerProcess:
    """Workers of these numbers; they step until they are closed.

    Args:
        job: The job.
        numbers: Of the workers of this process.
    """

    def __init__(self, job: WorkerJob, numbers: Sequence[int]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, far = context.Pipe()
        self._process = context.Process(target=_work, args=(far, job, list(numbers)), name=f"worker {numbers[0]} ...")
        self._process.start()
        far.close()  # so that the end of a process that fails is the end of the pipe

    def start(self, steps: int) -> None:
        """Have every worker take so many steps."""
        self._pipe.send(steps)

    def wait(self) -> float:
        """Wait until they are done; returns the processor time that they took in seconds."""
        return float(self._pipe.recv())

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.join()


class LightWorker:
    """Pulls and pushes distinct ids of each table, in mode `async`.

    Args:
        job: The job.
        number: Of the worker.
    """

    def __init__(self, job: WorkerJob, number: int) -> None:
        self._store = RemoteStore(
            job.endpoints,
            secret=job.secret,
            worker=number,
            workers=job.workers,
            mode="async",
            wire_dtype=job.wire_dtype,
        )
        names = [f"table-{table}" for table in range(job.tables)]
        self._store.declare([TableSpec(name, DIM, Adagrad(0.05)) for name in names])
        draw = np.random.default_rng(number)
        gradients = draw.normal(size=(job.keys, DIM)).astype(np.float32)
        ids = [[draw.choice(job.rows, job.keys, replace=False) for _ in names] for _ in range(BATCHES)]
        self._pulls = [[PullSpec(*named) for named in zip(names, batch, strict=True)] for batch in ids]
        self._pushes = [[TableUpdate(*named, gradients) for named in zip(names, batch, strict=True)] for batch in ids]
        self._step = 0

    def pull(self) -> None:
        """Pull the rows of a step."""
        self._store.pull(self._pulls[self._step % BATCHES], step=self._step).rows()

    def push(self) -> None:
        """Push the gradients of the step, which ends it."""
        self._store.push(self._pushes[self._step % BATCHES], step=self._step)
        self._step += 1

    def flush(self) -> None:
        """Wait until all pushes are acknowledged."""
        self._store.flush()

    def close(self) -> None:
        """Leave the servers."""
        self._store.close()


def _work(pipe: Pipe, job: WorkerJob, numbers: Sequence[int]) -> None:
    workers = [LightWorker(job, number) for number in numbers]
    threads = min(THREADS, len(workers))

    def steps_of(workers: Sequence[LightWorker], steps: int) -> None:
        for _ in range(steps):
            for worker in workers:
                worker.pull()
                worker.push()
        for worker in workers:
            worker.flush()

    with ThreadPoolExecutor(threads) as pool:
        while True:
            steps, before = pipe.recv(), time.process_time()
            list(pool.map(steps_of, [workers[part::threads] for part in range(threads)], [steps] * threads))
            pipe.send(time.process_time() - before)
