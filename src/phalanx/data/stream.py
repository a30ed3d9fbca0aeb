"""Batches from data that can only be read one row after the other.

A `shared` stream gives every rank the same rows: each reads all of it and keeps its part of every global
batch, so the batches are those of one process. A stream of its `own` on each rank (one that splits itself,
say by files) is batched as it comes. Either way the ranks tell each other at every step how many rows they
have, so that they end together and each batch is weighted by what it holds.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset

from phalanx.comm.context import BatchShare
from phalanx.data.ranks import Shard, gather_integers
from phalanx.data.shards import even_split
from phalanx.errors import DataError


@dataclass(frozen=True, slots=True)
class Portion:
    """What one rank loaded for one step of a stream."""

    batch: Any
    rows: int
    global_rows: int
    """Rows of the global batch as this rank read it; its own rows when the stream is its own."""


class PortionDataset(IterableDataset[Portion]):
    """One rank's portions of a stream, collated."""

    def __init__(
        self,
        dataset: Iterable[Any],
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
            for batch in self.dataset.batches(self.chunk, drop_last=self.drop_last):  # type: ignore[attr-defined]
                yield Portion(batch, len(batch[0]), len(batch[0]))
            return
        items = itertools.islice(iter(self.dataset), self.first, None)
        while rows := list(itertools.islice(items, self.chunk)):
            if len(rows) == self.chunk or not self.drop_last:
                yield self._portion(rows)

    def _portion(self, rows: list[Any]) -> Portion:
        if not self.is_shared:
            return Portion(self.collate_fn(rows), len(rows), len(rows))
        offset, count = even_split(len(rows), self.shard.count, self.shard.index)
        kept = rows[offset : offset + count] or rows[:1]
        return Portion(self.collate_fn(kept), count, len(rows))


def decides_batches(dataset: Any) -> bool:
    """Return whether a dataset hands out ready batches of this rank's own rows (`batches`), not one row at a time."""
    return getattr(dataset, "decides_batches", False)


def agree(portions: Iterator[Portion], shard: Shard, *, is_shared: bool) -> Iterator[tuple[Any, BatchShare]]:
    """Yield (batch, share) until every rank has run out.

    A rank that runs out first goes on with its last batch, which then counts 0 rows.
    Collective at every batch when the shard's ranks can be asked.

    Raises:
        DataError: On every rank, if a shared stream differs between ranks, a rank's own stream gave nothing,
            or the ranks' own streams began with the same rows.
    """
    last: Any = None
    for step in itertools.count():
        portion = next(portions, None)
        told = _tell(portion, with_digest=step == 0 and not is_shared)
        answers = gather_integers(told) if shard.is_checked else [told]
        check_answers(answers, step, is_shared)
        if not any(answer[2] for answer in answers):
            return
        last = last if portion is None else portion.batch
        rows = 0 if portion is None else portion.rows
        global_rows = told[1] if is_shared else sum(answer[0] for answer in answers)
        yield last, BatchShare(rows, global_rows)


def _tell(portion: Portion | None, *, with_digest: bool) -> list[int]:
    if portion is None:
        return [0, 0, 0, 0]
    return [portion.rows, portion.global_rows, 1, digest(portion.batch) if with_digest else 0]


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
    digests = [answer[3] for answer in answers]
    if len(set(digests)) < len(digests):
        later = next(rank for rank, digest in enumerate(digests) if digest in digests[:rank])
        earlier = digests.index(digests[later])
        raise DataError(
            f'With stream="own" each rank reads other rows, but ranks {earlier} and {later} began with the same '
            'batch. Split the stream by rank, or pass stream="shared" to have it split here.'
        )


def digest(batch: Any) -> int:
    """Return a checksum of a batch's tensors, the same for equal batches on any rank."""
    if isinstance(batch, torch.Tensor):
        return zlib.crc32(batch.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    if isinstance(batch, dict):
        batch = [batch[key] for key in sorted(batch, key=str)]
    if isinstance(batch, list | tuple):
        return zlib.crc32(repr([digest(part) for part in batch]).encode())
    return zlib.crc32(repr(batch).encode())
