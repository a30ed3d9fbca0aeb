"""Each training mode in a few lines of plain Python: what the modes of `phalanx.ps` are held against.

A step of a worker reads the rows of its keys, computes one gradient per row and pushes them; the rule is SGD. Workers
take their steps in the order of a schedule, so every run has one right answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from phalanx.ps.stores.base import PullSpec
from phalanx.ps.stores.update import TableUpdate
from phalanx.ps.table.rules import Constant, TableSpec
from phalanx.ps.table.update_rules import SGD

DIM = 3
LR = 0.1
START = 0.5
SPEC = TableSpec(name="ids", dim=DIM, rule=SGD(lr=LR), init=Constant(START))
EVERY_KEY = np.array([0, 1, 2, 3, 4, 5, 6, -1, -2, 2**62], np.int64)


def keys_of(worker, step):
    """Five different ids; some are every worker's, some come back after a few steps."""
    picked = {(worker * 3 + step * stride) % len(EVERY_KEY) for stride in (1, 3, 7)} | {0, (step + 1) % 4}
    return EVERY_KEY[sorted(picked)]


def gradient(worker, step, key, row):
    """The gradient of 1/2 |row - target|^2, whose target depends on who asks, when, and for what."""
    target = math.sin(int(key) % 97 + 0.3 * worker + 0.05 * step)
    return np.asarray(row, np.float64) - target


class Simulation:
    """Rows by id, and one step of one worker in each mode."""

    def __init__(self, workers):
        self.workers = workers
        self.rows = {}
        self.steps = [0] * workers
        self.pushes = [0] * workers

    def row(self, key):
        return self.rows.setdefault(int(key), np.full(DIM, START))

    def gradients(self, worker, read=None):
        step = self.steps[worker]
        self.steps[worker] += 1
        read = read or self.row
        return {int(key): gradient(worker, step, key, read(key)) for key in keys_of(worker, step)}

    def apply(self, gradients):
        for key, value in gradients.items():
            self.rows[key] = self.row(key) - LR * value


class Async(Simulation):
    def step(self, worker):
        self.apply(self.gradients(worker))
        self.pushes[worker] += 1

    def finish(self, worker):
        pass


class HalfAsync(Simulation):
    def __init__(self, workers, steps):
        super().__init__(workers)
        self.every = steps
        self.held = [[] for _ in range(workers)]

    def step(self, worker):
        self.held[worker].append(self.gradients(worker))
        if len(self.held[worker]) == self.every:
            self.finish(worker)

    def finish(self, worker):
        if self.held[worker]:
            total = {}
            for gradients in self.held[worker]:
                for key, value in gradients.items():
                    total[key] = total.get(key, 0.0) + value
            self.apply(total)
            self.pushes[worker] += 1
        self.held[worker] = []


class Geo(Simulation):
    def __init__(self, workers, steps):
        super().__init__(workers)
        self.every = steps
        self.base = [{} for _ in range(workers)]
        self.copy = [{} for _ in range(workers)]

    def step(self, worker):
        base, copy = self.base[worker], self.copy[worker]

        def read(key):
            if int(key) not in base:
                base[int(key)] = copy[int(key)] = self.row(key)
            return copy[int(key)]

        for key, value in self.gradients(worker, read).items():
            copy[key] = copy[key] - LR * value
        if self.steps[worker] % self.every == 0:
            self.finish(worker)

    def finish(self, worker):
        if self.base[worker]:
            for key, base in self.base[worker].items():
                self.rows[key] = self.row(key) + (self.copy[worker][key] - base) / self.workers
            self.pushes[worker] += 1
        self.base[worker], self.copy[worker] = {}, {}


class Sync(Simulation):
    """All workers step together: gradients are averaged by the rows of each worker's batch."""

    def step_all(self, weights):
        total = {}
        for worker, weight in enumerate(weights):
            if weight is None:
                continue
            for key, value in self.gradients(worker).items():
                total[key] = total.get(key, 0.0) + value * weight / sum(w for w in weights if w is not None)
            self.pushes[worker] += 1
        self.apply(total)


def take_step(mode, worker):
    """Let a worker take its next step through a real mode."""
    step = mode.step
    keys = keys_of(worker, step)
    (rows,) = mode.pull([PullSpec("ids", keys)]).rows()
    values = np.array([gradient(worker, step, key, row) for key, row in zip(keys, rows, strict=True)], np.float32)
    mode.push([TableUpdate("ids", keys, values)], weight=batch_rows(worker))


def batch_rows(worker):
    """How many rows the batches of a worker have: not the same for all."""
    return float(2 + worker)


def run(modes, schedule):
    """Take the steps of a schedule (worker numbers) through real modes, and send what they hold back."""
    for worker in schedule:
        take_step(modes[worker], worker)
        modes[worker].store.flush()  # so that the next worker reads what this one pushed
    for mode in modes:
        mode.flush()


def simulate(simulation, schedule):
    for worker in schedule:
        simulation.step(worker)
    for worker in range(simulation.workers):
        simulation.finish(worker)
    return simulation


def table_of(store, step=0):
    """Every row of the test's table, in the order of `EVERY_KEY`, after so many pushes of this worker."""
    (rows,) = store.pull([PullSpec("ids", EVERY_KEY)], step=step).rows()
    return rows


def rows_of(simulation: Simulation, keys: Sequence[int] = tuple(EVERY_KEY)):
    return np.array([simulation.row(key) for key in keys])
