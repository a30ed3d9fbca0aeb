"""Rows in RocksDB are trained as a table trains them; a dictionary stands for the database."""

from types import SimpleNamespace

import numpy as np

from benchmarks.tiers_rocks import RocksWorker
from phalanx.ps.table.reference import ReferenceTable
from phalanx.ps.table.rules import Constant, TableSpec
from phalanx.ps.table.update_rules import Adagrad

SPEC = TableSpec("rows", 4, Adagrad(0.1), init=Constant(0.0))


class Rows(dict):
    """Has of RocksDB what the worker calls."""

    def get(self, keys):
        return [self[key] for key in keys]

    def write(self, batch, options):
        assert options.disable_wal
        self.update(batch)


class Batch(dict):
    def __init__(self, *, raw_mode):
        assert raw_mode

    def put(self, key, value):
        self[key] = value


def test_steps_give_the_rows_of_a_table():
    module = SimpleNamespace(WriteOptions=lambda: SimpleNamespace(disable_wal=False), WriteBatch=Batch)
    worker, table = RocksWorker(module, Rows()), ReferenceTable(SPEC)
    worker.declare(SPEC)
    draw = np.random.default_rng(0)
    keys = np.array([5, -7, 2**62], np.int64)
    for is_first in (True, False, False):
        gradients = draw.normal(size=(3, 4)).astype(np.float32)
        if not is_first:
            worker.pull("rows", keys)
        worker.push("rows", keys, gradients)
        table.push(keys, gradients)
    expected = np.empty((3, 4), np.float32)
    table.pull(keys, expected)

    np.testing.assert_allclose(worker.pull("rows", keys), expected, rtol=1e-6)
