"""`BadRecords`: skip and count broken records, or raise at the first."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Literal, TypeVar, get_args

from phalanx.data.sampling.ranks import DataShard, gather_integers
from phalanx.errors import ConfigError, DataError, did_you_mean

logger = logging.getLogger("phalanx.data")

OnCorrupt = Literal["stop", "skip"]


class BadRecords:
    """The broken records that a reader has skipped.

    Args:
        on_corrupt: `stop` at a broken record with an error that names it, or `skip` it.

    Raises:
        ConfigError: If it is neither.
    """

    def __init__(self, on_corrupt: OnCorrupt = "stop") -> None:
        if on_corrupt not in get_args(OnCorrupt):
            hint = did_you_mean(str(on_corrupt), get_args(OnCorrupt))
            raise ConfigError(f"Asked for on_corrupt={on_corrupt!r}.{hint} Give 'stop' or 'skip'.")
        self.on_corrupt = on_corrupt
        self.count = 0
        """Records left out here so far."""

        self.global_count = 0
        """Records left out by all ranks when an epoch ended last; the same on every rank."""

        self.first = ""
        """The first of them: its file, its place, what is wrong."""

    def __repr__(self) -> str:
        return f"{self.count} broken records left out" + (f"; the first: {self.first}" if self.first else "")

    def add(self, problem: str, records: int = 1) -> None:
        """Take note of broken records, the first of which `problem` names; without a full stop.

        Raises:
            DataError: If reading is to stop at them.
        """
        if self.on_corrupt == "stop":
            raise DataError(f'{problem}. Get the file again, or pass on_corrupt="skip" to leave such records out.')
        self.first = self.first or problem
        self.count += records


_T = TypeVar("_T")


def report_bad_records(dataset: Any, batches: Iterator[_T], shard: DataShard, *, is_own: bool) -> Iterator[_T]:
    """Return an epoch's batches; for a dataset that skips records, log their number at the end, on all ranks.

    Such a dataset makes it collective, when `shard.is_checked`: at the first batch of data that all ranks share, which
    must have left out the same number; at the end of streams of a rank's own, whose numbers are added up.

    Args:
        dataset: What is read.
        batches: Its batches.
        shard: Which part of it this process reads.
        is_own: Whether each rank reads other files.

    Raises:
        DataError: On every rank, while iterating, if data that all ranks share differs.
    """
    corrupt = getattr(dataset, "corrupt", None)
    if not isinstance(corrupt, BadRecords) or corrupt.on_corrupt == "stop":
        return batches
    return _report_bad_records(dataset, corrupt, batches, shard, is_own)


def _report_bad_records(
    dataset: Any, corrupt: BadRecords, batches: Iterator[_T], shard: DataShard, is_own: bool
) -> Iterator[_T]:
    name = type(dataset).__name__
    if shard.is_checked and not is_own:
        _check_alike(name, gather_integers([len(dataset), corrupt.count]))
    yield from batches
    adds_up = shard.is_checked and is_own
    corrupt.global_count = sum(count for (count,) in gather_integers([corrupt.count])) if adds_up else corrupt.count
    if corrupt.global_count and shard.index == 0:
        first = f"; the first here: {corrupt.first}" if corrupt.first else ""
        logger.warning("%d broken records of %s left out so far%s", corrupt.global_count, name, first)


def _check_alike(name: str, everyone: list[list[int]]) -> None:
    if len({tuple(report) for report in everyone}) > 1:
        reports = ", ".join(
            f"rank {rank} has {samples} and left out {out}" for rank, (samples, out) in enumerate(everyone)
        )
        raise DataError(f"The ranks read different records of {name}: {reports}. Give all of them the same files.")
