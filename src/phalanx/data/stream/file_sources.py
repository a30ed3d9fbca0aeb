"""`FileSource`: assigns files to workers, fixed or by leases, and tracks how far each was read.

A file is read by one worker at a time; so N workers need at least N files. Progress counts, for each file, the
epochs it was read to the end and the samples read of the next: it tells what is left to read for any number of workers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from phalanx.data.sampling.ranks import current_shard
from phalanx.errors import ConfigError

logger = logging.getLogger("phalanx.data")


@dataclass(frozen=True, slots=True)
class FileLease:
    """One file for this worker to read."""

    file: str
    first_row: int = 0
    """Rows of it that were read before."""


class FileSource(Protocol):
    """Assigns files to this worker; only one thread calls it."""

    def lease(self, epoch: int) -> FileLease | None:
        """Return the next file of an epoch, counted from 0; None when this worker has no more to read of it."""
        ...

    def advance(self, epoch: int, file: str, samples: int, *, is_finished: bool) -> None:
        """Record that so many samples of a leased file were passed to training, and whether these were all."""
        ...

    def settle(self) -> None:
        """Confirm that all samples passed to training so far were trained on."""
        ...

    def next_epoch(self) -> int:
        """Return the first epoch that was not read to its end."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the progress as plain values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state`."""
        ...


class SplitFiles:
    """Worker r of N reads files r, r + N, r + 2N, ...; nothing is communicated.

    Its state holds what this worker read; `merge_states` joins the workers', and the result serves any number of them.

    Args:
        files: All files of the job, the same list on every worker.
        shard: (index, count) to read as, instead of this process's rank and world size.
    """

    def __init__(self, files: Sequence[str], shard: tuple[int, int] | None = None) -> None:
        self.files, self._shard = list(files), shard
        self._progress: dict[str, tuple[int, int]] = {}
        self._leased: tuple[int, set[str]] = (-1, set())

    def mine(self) -> list[str]:
        """Return this worker's files."""
        index, count = self._shard or current_shard()
        return self.files[index::count]

    def lease(self, epoch: int) -> FileLease | None:
        """Return the next file of an epoch that is not read to its end; see `FileSource`."""
        if self._leased[0] != epoch:
            self._start(epoch)
        for file in self.mine():
            epochs, samples = self._progress[file]
            if epochs == epoch and file not in self._leased[1]:
                self._leased[1].add(file)
                return FileLease(file, samples)
        return None

    def _start(self, epoch: int) -> None:
        self._leased = (epoch, set())
        for file in self.mine():
            # What is left of an epoch that was broken off is not read later.
            self._progress[file] = max(self._progress.get(file, (0, 0)), (epoch, 0))
        index, count = self._shard or current_shard()
        if index >= len(self.files):
            logger.warning(
                "worker %d of %d has no file to read. Cut the data into at least as many files", index, count
            )

    def advance(self, epoch: int, file: str, samples: int, *, is_finished: bool) -> None:
        """Note how far a file was read; see `FileSource`."""
        self._progress[file] = (epoch + 1, 0) if is_finished else (epoch, samples)

    def settle(self) -> None:
        """Do nothing: a state counts the current batch as done."""

    def next_epoch(self) -> int:
        """Return the first epoch that was not read to its end, by any worker of a merged state."""
        return min((epochs for epochs, _ in self._progress.values()), default=0)

    def state_dict(self) -> dict[str, Any]:
        """Return, for each of this worker's files, the epochs read to the end and the samples read of the next."""
        return {"version": 1, "files": {file: list(self._progress.get(file, (0, 0))) for file in self.mine()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            ConfigError: If it is of another version, or lacks a file that this worker reads.
        """
        saved_files = set(state.get("files", ()))
        if state.get("version") != 1 or not set(self.mine()) <= saved_files:
            raise ConfigError(
                f"Asked to load a state of the files {sorted(saved_files)}, but this worker reads {self.mine()}. Load "
                "what state_dict() of the same files returned; for another number of workers, merge_states of all of "
                "them."
            )
        self._progress = {file: (int(at[0]), int(at[1])) for file, at in state["files"].items()}
        self._leased = (-1, set())


class LeaseStore(Protocol):
    """What `LeasedFiles` asks; a job's `phalanx.ps.stores.base.TableStore` is one."""

    def lease(self, epoch: int, files: Sequence[str]) -> tuple[str | None, int, int]:
        """Return a file that nobody reads (or None), the rows of it that are done, and how many files are left."""
        ...

    def report_progress(self, epoch: int, file: str, offset: int, *, end: bool = True) -> None:
        """Report the rows of a leased file that were trained on, and whether these were all."""
        ...


REPORT_ROWS = 65_536
"""Rows of a file between two reports of its progress; at its end there always is one."""


class LeasedFiles:
    """Gives each worker that is free the next file that nobody reads; the parameter servers keep who has which.

    A fast worker reads more files. The file of a worker that died goes to the next that asks, from the last report
    on: at most `REPORT_ROWS` samples and a batch are then trained on twice, none is left out. Progress is in the
        servers'
    snapshots.

    Args:
        store: The job's store.
        files: All files of the job, the same list on every worker.
    """

    def __init__(self, store: LeaseStore, files: Sequence[str]) -> None:
        self._store, self.files = store, list(files)
        self._reported: dict[str, int] = {}
        self._handed_out: dict[str, tuple[int, int, bool]] = {}

    def lease(self, epoch: int) -> FileLease | None:
        """Return a file that nobody reads; None when all are done or being read."""
        file, samples, _ = self._store.lease(epoch, self.files)
        if file is None:
            return None
        self._reported[file] = samples
        return FileLease(file, samples)

    def advance(self, epoch: int, file: str, samples: int, *, is_finished: bool) -> None:
        """Record what is passed to training; see `FileSource`."""
        self._handed_out[file] = (epoch, samples, is_finished)

    def settle(self) -> None:
        """Report what was trained on, where there is enough of it."""
        for file, (epoch, samples, is_finished) in list(self._handed_out.items()):
            if is_finished or samples - self._reported[file] >= REPORT_ROWS:
                self._store.report_progress(epoch, file, samples, end=is_finished)
                self._reported[file] = samples
                del self._handed_out[file]

    def next_epoch(self) -> int:
        """Return 0: of an epoch that is done the servers have no file to give."""
        return 0

    def state_dict(self) -> dict[str, Any]:
        """Return nothing to load: the servers keep the progress."""
        return {"version": 1, "files": {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: the servers keep the progress."""


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the one state that holds what every worker read, from the `state_dict()` of each."""
    merged: dict[str, list[int]] = {}
    for state in states:
        for file, at in state["files"].items():
            merged[file] = max(merged.get(file, [0, 0]), list(at))
    return {"version": 1, "files": merged}
