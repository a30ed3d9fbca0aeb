"""`RocksServer`: the rows of a table in RocksDB, read, changed and written back by threads of this process."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import ROCKSDICT, python_of
from phalanx.ps.stores.base import Keys, Rows
from phalanx.ps.table.rules import TableSpec

KEY_BYTES = 8
WRITE_BUFFER_BYTES = 64 << 20


class RocksWorker:
    """Trains rows with Adagrad in NumPy, as one of several threads.

    A step reads each row once: a push takes those that the pull before it has read.

    Args:
        rocksdict: The module.
        rows: The database.
    """

    def __init__(self, rocksdict: Any, rows: Any) -> None:
        self._rocksdict, self._rows = rocksdict, rows
        self._write = rocksdict.WriteOptions()
        self._write.disable_wal = True  # the servers beside it have no log either
        self._pulled: tuple[Keys, Rows] | None = None

    def declare(self, spec: TableSpec) -> None:
        """Take note of the rule, and of how many values a row has."""
        self._rule, self._dim = spec.rule, spec.dim

    def pull(self, _table: str, keys: Keys) -> Rows:
        """Return rows; each has been pushed before."""
        read = b"".join(self._rows.get(self._bytes_of(keys)))
        rows = np.frombuffer(read, np.float32).reshape(len(keys), 2 * self._dim)
        self._pulled = keys, rows
        return rows[:, : self._dim]

    def push(self, _table: str, keys: Keys, gradients: Rows) -> None:
        """Change the rows that were pulled, or write new ones."""
        pulled, self._pulled = self._pulled, None
        is_new = pulled is None or pulled[0] is not keys
        rows = np.zeros((len(keys), 2 * self._dim), np.float32) if is_new else pulled[1].copy()
        self._rule.update(rows[:, : self._dim], rows[:, self._dim :], gradients, self._rule.lr)
        batch, width = self._rocksdict.WriteBatch(raw_mode=True), rows.shape[1] * rows.itemsize
        written = rows.tobytes()
        for number, key in enumerate(self._bytes_of(keys)):
            batch.put(key, written[number * width : (number + 1) * width])
        self._rows.write(batch, self._write)

    def flush(self) -> None:
        """Do nothing: a push has ended when it returns."""

    def _bytes_of(self, keys: Keys) -> list[bytes]:
        every = keys.astype(">i8").tobytes()
        return [every[start : start + KEY_BYTES] for start in range(0, len(every), KEY_BYTES)]


class RocksServer:
    """RocksDB with direct reads, and blocks of rows in memory.

    Args:
        folder: Where its files are.
        memory_bytes: Of its cache of blocks, indexes and filters; what is being written has its own memory.
        workers: How many threads train.

    Raises:
        PeerMissingError: If rocksdict cannot be installed.
    """

    def __init__(self, folder: Path, memory_bytes: int, workers: int) -> None:
        rocksdict = module()
        tables = rocksdict.BlockBasedOptions()
        tables.set_block_cache(rocksdict.Cache(memory_bytes))
        tables.set_cache_index_and_filter_blocks(True)
        tables.set_bloom_filter(10, False)
        options = rocksdict.Options(raw_mode=True)
        options.set_block_based_table_factory(tables)
        options.set_compression_type(rocksdict.DBCompressionType.none())
        options.set_use_direct_reads(True)
        options.set_use_direct_io_for_flush_and_compaction(True)
        options.set_write_buffer_size(WRITE_BUFFER_BYTES)
        options.set_max_background_jobs(2)
        self._rows = rocksdict.Rdict(str(folder / "rocks"), options)
        self.workers = [RocksWorker(rocksdict, self._rows) for _ in range(workers)]

    def settle(self) -> None:
        """Merge what was written, as it would be after a while."""
        self._rows.flush()
        self._rows.compact_range(None, None)

    def close(self) -> None:
        """Close its files."""
        self._rows.close()


def module() -> Any:
    """Return rocksdict, which runs in this process from the environment made for it."""
    python = python_of("rocksdict", ROCKSDICT)
    sys.path.append(str(next(python.parents[1].glob("lib/python*/site-packages"))))
    return importlib.import_module("rocksdict")
