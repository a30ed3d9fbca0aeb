"""Batches from data that can only be read one row after the other.

A `shared` stream gives every rank the same rows: each reads all of it and keeps its part of every global
batch, so the batches are those of one process. A stream of its `own` on each rank (one that splits itself,
say by files) is batched as it comes. Either way the ranks tell each other at every step how many rows they
have, so that they end together and each batch is weighted by what it holds.
"""

from __future__ import annotations

import itertools
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import IterableDataset

from phalanx.comm.context import BatchShare
from phalanx.data.samples.sources import decides_batches
from phalanx.data.sampling.ranks import Shard, gather_integers
from phalanx.data.sampling.shards import even_split
from phalanx.errors import DataError

logger = logging.getLogger("phalanx.data")

COMPARED_ROWS = 16
"""Rows at the beginning of a shared stream that the ranks compare."""


@dataclass(frozen=True, slots=True)
class Portion:
    """What one rank loaded for one step of a stream."""

    batch: Any
    rows: int
    global_rows: int
    """Rows of the global batch as this rank read it; its own rows when the stream is its own."""

    position: int = 0
    """Rows of a shared stream that were read when this portion was done, those that were left out included."""

    begins_with: int = 0
    """Of a shared stream's first portion, a checksum of the first rows of all ranks; 0 where nothing is compared."""


class PortionDataset(IterableDataset[Portion]):
    """One rank's portions of a stream, collated."""

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[list[Any]], Any],
        shard: Shard,
        *,
        global_batch: int,
        drop_last: bool,
        is_shared: bool,
        first: int = 0,
    ) -> None:
        self.dataset, self.collate_fn, self.shard = dataset, collate_fn, shard
        self.is_shared, self.drop_last, self.first = is_shared, drop_last, first
        own_rows = even_split(global_batch, shard.count, shard.index)[1]
        self.chunk = global_batch if is_shared else max(own_rows, 1)

    def __iter__(self) -> Iterator[Portion]:
        if decides_batches(self.dataset):
            for batch in self.dataset.batches(self.chunk, drop_last=self.drop_last):
                yield Portion(batch, len(batch[0]), len(batch[0]))
            return
        position = 0
        for span in spans_of(self.dataset):
            items = iter(span)
            position += sum(1 for _ in itertools.islice(items, max(self.first - position, 0)))
            while rows := list(itertools.islice(items, self.chunk)):
                position += len(rows)
                if len(rows) == self.chunk or not self.drop_last:
                    yield self._portion(rows, position, is_first=position == self.first + len(rows))

    def _portion(self, rows: list[Any], position: int, *, is_first: bool) -> Portion:
        if not self.is_shared:
            return Portion(self.collate_fn(rows), len(rows), len(rows))
        offset, count = even_split(len(rows), self.shard.count, self.shard.index)
        kept = rows[offset : offset + count] or rows[:1]
        begins_with = digest(rows[:COMPARED_ROWS], of_others=_kind) if is_first else 0
        return Portion(self.collate_fn(kept), count, len(rows), position, begins_with)


def spans_of(dataset: Any) -> Iterable[Iterable[Any]]:
    """Return what is cut into batches one after the other: the dataset, or the spans a pipeline makes of it."""
    spans: Iterable[Iterable[Any]] = dataset.spans() if hasattr(dataset, "spans") else (dataset,)
    return spans


def agree(
    portions: Iterator[Portion], shard: Shard, *, is_shared: bool, first: int = 0, readers: int = 1
) -> Iterator[tuple[Any, BatchShare, int]]:
    """Yield (batch, share, position after it) until every rank has run out.

    A rank that runs out first goes on with its last batch, which then counts 0 rows.
    Collective at every batch when the shard's ranks can be asked.

    Args:
        portions: What this rank loads.
        shard: Which part of how many that is.
        is_shared: Whether all ranks read the same rows.
        first: Position before the first portion.
        readers: Worker processes that read streams of their own on each rank, whose portions come in turn.

    Raises:
        DataError: On every rank, if a shared stream differs between ranks, a rank's own stream gave nothing,
            or the own streams of ranks or workers began with the same rows.
    """
    last: Any = None
    position, begun = first, dict[int, tuple[int, int]]()
    for step in itertools.count():
        portion = next(portions, None)
        told = _tell(portion, is_compared=step < readers, is_shared=is_shared)
        answers = gather_integers(told) if shard.is_checked else [told]
        check_answers(answers, step, is_shared)
        if not is_shared:
            check_beginnings(answers, step, begun)
        elif len({answer[3] for answer in answers}) > 1 and shard.index == 0:
            logger.warning(
                "the ranks read different rows from a stream that they share: rows may be trained on twice or never. "
                "Let it yield the same rows on every rank (seed its random numbers)"
            )
        if not any(answer[2] for answer in answers):
            return
        last = _copied(last) if portion is None else portion.batch
        rows = 0 if portion is None else portion.rows
        global_rows = told[1] if is_shared else sum(answer[0] for answer in answers)
        position = portion.position if is_shared and portion is not None else position + global_rows
        yield last, BatchShare(rows, global_rows), position


def _copied(batch: Any) -> Any:
    """Return a batch that is handed out once more, in memory of its own as every batch."""
    return tree_map(lambda part: part.detach().clone() if isinstance(part, torch.Tensor) else part, batch)


def _tell(portion: Portion | None, *, is_compared: bool, is_shared: bool) -> list[int]:
    if portion is None:
        return [0, 0, 0, 0]
    begins_with = 0 if not is_compared else portion.begins_with if is_shared else digest(portion.batch)
    return [portion.rows, portion.global_rows, 1, begins_with]


def check_answers(answers: list[list[int]], step: int, is_shared: bool) -> None:
    """Raise `DataError` if what the ranks told each other (see `_tell`) shows that their streams are wrong."""
    found = [answer[1] for answer in answers]
    if is_shared and len(set(found)) > 1:
        raise DataError(
            f"The ranks read different streams: at batch {step} they found {found} rows (rank 0 first). "
            "Let the generator yield the same rows on every rank (seed its random numbers), or pass "
            'stream="own" if it splits itself over the ranks.'
        )
    if step > 0 or is_shared or not any(found):
        return
    empty = [rank for rank, rows in enumerate(found) if rows == 0]
    if empty:
        raise DataError(
            f'With stream="own" every rank needs rows, but the stream of rank {empty[0]} is empty. '
            "Split the data into at least as many parts as there are ranks."
        )


def check_beginnings(answers: list[list[int]], step: int, begun: dict[int, tuple[int, int]]) -> None:
    """Raise `DataError` if an own stream of a rank, or of one of its workers, began like another.

    Args:
        answers: What the ranks told each other, see `_tell`; nothing is compared without a digest.
        step: Which batch that was: the workers' first ones come in turn.
        begun: Digest -> (rank, worker) of the steps before; added to.
    """
    for rank, (*_, digest) in enumerate(answers):
        other, worker = begun.setdefault(digest, (rank, step)) if digest else (rank, step)
        if (other, worker) != (rank, step):
            who = f"workers {worker} and {step} of rank {rank}" if other == rank else f"ranks {other} and {rank}"
            raise DataError(
                f'With stream="own" every rank and worker reads other rows, but {who} began with the same batch. Split '
                "the stream by rank, and by torch.utils.data.get_worker_info(), or pass "
                'stream="shared" to have it split here.'
            )


def digest(value: Any, of_others: Callable[[Any], str] = repr) -> int:
    """Return a checksum of a batch or of samples, the same for equal ones on any rank.

    Args:
        value: Tensors, arrays, numbers, text, or dicts and sequences of them.
        of_others: What stands for anything else.
    """
    if isinstance(value, torch.Tensor):
        return zlib.crc32(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return zlib.crc32(value.tobytes())
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value, key=str)]
    if isinstance(value, list | tuple):
        return zlib.crc32(repr([digest(part, of_others) for part in value]).encode())
    is_plain = isinstance(value, int | float | str | bytes | np.generic)
    return zlib.crc32((repr(value) if is_plain else of_others(value)).encode())


def _kind(value: Any) -> str:
    return type(value).__name__  # an address in a repr would differ between ranks
