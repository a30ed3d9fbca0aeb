"""`InMemoryDataset`: click logs in the workers' memory, with local and global shuffles (Fleet's API)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from phalanx.comm import all_to_all
from phalanx.data.ctr.slot_dataset import SlotDataset
from phalanx.data.ctr.slot_rows import Batch, SlotRows, from_lengths, join
from phalanx.data.sampling.ranks import current_shard
from phalanx.data.sampling.shuffle import hash_numbers, mixed_seed
from phalanx.errors import ConfigError

_Shuffle = tuple[str, int]
"""`local` or `global`, and its number."""


class InMemoryDataset(SlotDataset):
    """Loads this worker's files, then iterates over its rows any number of times.

        dataset = InMemoryDataset("logs/", criteo_schema(), batch_size=512)
        dataset.load_into_memory()
        for epoch in range(2):
            dataset.global_shuffle()                       # or local_shuffle(), or nothing
            for dense, ids, label in dataset: ...

    A row is identified by its file and index. A shuffle orders rows by a hash of (seed, number of the shuffle, row);
    a global one gives worker r the rows in the r-th part of the hash's range. So every row is on exactly one worker,
    and the workers' rows side by side are the same for any number of them. Arguments: see `SlotDataset`.
    """

    _rows: SlotRows | None = None
    _keys: NDArray[np.uint64]
    _shuffles: int = 0
    _applied_shuffles: tuple[_Shuffle, ...] = ()
    """The shuffles that led to the current order: the last global one, and the last local one after it."""
    _loads: int = 0
    _epoch: int = 0
    _position: int = 0
    _first: int = 0

    def load_into_memory(self) -> None:
        """Read this worker's files. Not collective.

        Raises:
            DataError: If a file cannot be read or a line is broken.
            ConfigError: If this worker has no rows.
        """
        parts: list[SlotRows] = []
        keys: list[NDArray[np.uint64]] = []
        while (lease := self.source.lease(self._loads)) is not None:
            rows = 0
            for block in self.reader.blocks(lease.file):
                parts.append(block)
                rows += len(block)
            # Keys of files of 2**40 rows would collide; that is more than a worker holds.
            keys.append(np.uint64(self.files.index(lease.file) << 40) + np.arange(rows, dtype=np.uint64))
            self.source.advance(self._loads, lease.file, rows, is_finished=True)
        if not parts:
            index, count = current_shard()
            raise ConfigError(
                f"Worker {index} of {count} found no rows in its part of {len(self.files)} files. Give each worker at "
                "least one file with rows."
            )
        self._rows, self._keys = join(parts), np.concatenate(keys)
        self._loads, self._applied_shuffles = self._loads + 1, ()

    @property
    def rows(self) -> int:
        """How many rows this worker holds."""
        return len(self._rows_in_memory())

    def local_shuffle(self) -> None:
        """Shuffle this worker's rows. Not collective."""
        self._shuffle(("local", self._shuffles))

    def global_shuffle(self) -> None:
        """Redistribute the rows of all workers in a new order.

        Collective: every worker calls it. Each row is sent at most once.
        """
        self._shuffle(("global", self._shuffles))

    def release_memory(self) -> None:
        """Release the rows."""
        self._rows = None

    def _begin_epoch(self, rows: int, drop_last: bool) -> Iterator[Batch]:
        return self._iterate(self._rows_in_memory(), rows, drop_last)

    def _iterate(self, samples: SlotRows, rows: int, drop_last: bool) -> Iterator[Batch]:
        first, self._first = self._first, 0
        for start in range(first, len(samples), rows):
            batch = samples.slice(start, start + rows)
            if len(batch) < rows and drop_last:
                break
            self._position = start + len(batch)
            yield batch.tensors()
        self._epoch, self._position = self._epoch + 1, 0

    def _rows_in_memory(self) -> SlotRows:
        if self._rows is None:
            raise ConfigError("The rows of an InMemoryDataset are not in memory. Call load_into_memory() first.")
        return self._rows

    def _shuffle(self, shuffle: _Shuffle) -> None:
        kind, number = shuffle
        rows, keys = self._rows_in_memory(), self._keys
        hashes = hash_numbers(keys, mixed_seed(self.seed, number))
        if kind == "global":
            rows, keys = _exchange(rows, keys, hashes)
            hashes = hash_numbers(keys, mixed_seed(self.seed, number))
        order = np.argsort(hashes, kind="stable")
        self._rows, self._keys = rows.take(order), keys[order]
        self._shuffles = number + 1
        self._applied_shuffles = (*(s for s in self._applied_shuffles if s[0] == "global" != kind), shuffle)

    # -- saving ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the shuffles and the position; inside the loop the current batch counts as done."""
        _, workers = current_shard()
        return {
            "version": 1,
            "epoch": self._epoch,
            "position": self._position,
            "seed": self.seed,
            "shuffles": [list(shuffle) for shuffle in self._applied_shuffles],
            "workers": workers,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the order of `state` and resume there in the next iteration.

        Call it after `load_into_memory`. Collective when the rows had been shuffled globally.

        Raises:
            ConfigError: If `state` is of another version or seed, or lies inside an epoch of another number of workers.
        """
        _, workers = current_shard()
        if state.get("version") != 1 or state["seed"] != self.seed:
            raise ConfigError(
                f"Asked to load version {state.get('version')} with seed {state.get('seed')}; this dataset has version "
                f"1 and seed {self.seed}. Make it with the saved seed."
            )
        if state["position"] and state["workers"] != workers:
            raise ConfigError(
                f"The state was saved inside an epoch by {state['workers']} workers, but there are {workers}. Resume "
                "with as many, or save between two epochs."
            )
        for kind, number in state["shuffles"]:
            self._shuffle((kind, int(number)))
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._first = self._position


def _exchange(
    rows: SlotRows, keys: NDArray[np.uint64], hashes: NDArray[np.uint64]
) -> tuple[SlotRows, NDArray[np.uint64]]:
    """Send every row to the worker that owns its hash; return the received rows."""
    _, workers = current_shard()
    if workers == 1:
        return rows, keys
    owners = ((hashes >> np.uint64(32)) * np.uint64(workers)) >> np.uint64(32)
    order = np.argsort(owners, kind="stable")
    counts = np.bincount(owners.astype(np.int64), minlength=workers).tolist()
    rows, keys = rows.take(order), keys[order]
    new_keys = _send(keys.view(np.int64), counts).view(np.uint64)
    label = _send(rows.label, counts) if len(rows.label) else rows.label
    dense = _send(rows.dense, counts)
    lengths = rows.lengths
    if lengths is None:
        return SlotRows(label, dense, _send(rows.ids, counts)), new_keys
    ends = np.cumsum([0, *counts])
    ids_for = [int(lengths[a:b].sum()) for a, b in itertools.pairwise(ends)]
    return from_lengths(label, dense, _send(rows.ids, ids_for), _send(lengths, counts)), new_keys


def _send(array: NDArray[Any], counts: list[int]) -> NDArray[Any]:
    received: NDArray[Any] = all_to_all(torch.from_numpy(np.ascontiguousarray(array)), sizes=counts).numpy()
    return received
