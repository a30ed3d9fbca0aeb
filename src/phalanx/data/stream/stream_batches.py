"""`StreamBatches`: a rank's batches of an iterable dataset, of equal count on all ranks.

A `shared` stream gives every rank the same samples: each reads all of it and keeps its part of every global
batch, so the batches are those of one process. A stream of its `own` on each rank (one that splits itself,
for example by files) is batched as it comes. Either way the ranks exchange the number of samples at every step, so
that they end together and each batch is weighted by its size.
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
from phalanx.data.samples.data_source import decides_batches
from phalanx.data.sampling.ranks import DataShard, gather_integers
from phalanx.data.sampling.shards import even_split
from phalanx.errors import DataError

logger = logging.getLogger("phalanx.data")

COMPARED_SAMPLES = 16
"""Samples at the beginning of a shared stream that the ranks compare."""


@dataclass(frozen=True, slots=True)
class StreamBatch:
    """One rank's batch for one step of a stream."""

    batch: Any
    rows: int
    global_rows: int
    """Samples of the global batch as this rank read it; its own samples if the stream is its own."""

    position: int = 0
    """Samples of a shared stream that were read when this portion was done, including dropped ones."""

    begins_with: int = 0
    """For the first batch of a shared stream, a checksum of the first samples of all ranks; else 0."""


class StreamBatches(IterableDataset[StreamBatch]):
    """One rank's batches of a stream, collated."""

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[list[Any]], Any],
        shard: DataShard,
        *,
        global_batch: int,
        drop_last: bool,
        is_shared: bool,
        first: int = 0,
    ) -> None:
        self.dataset, self.collate_fn, self.shard = dataset, collate_fn, shard
        self.is_shared, self.drop_last, self.first = is_shared, drop_last, first
        own_samples = even_split(global_batch, shard.count, shard.index)[1]
        self.chunk = global_batch if is_shared else max(own_samples, 1)

    def __iter__(self) -> Iterator[StreamBatch]:
        if decides_batches(self.dataset):
            for batch in self.dataset.batches(self.chunk, drop_last=self.drop_last):
                yield StreamBatch(batch, len(batch[0]), len(batch[0]))
            return
        position = 0
        for span in spans_of(self.dataset):
            items = iter(span)
            position += sum(1 for _ in itertools.islice(items, max(self.first - position, 0)))
            while samples := list(itertools.islice(items, self.chunk)):
                position += len(samples)
                if len(samples) == self.chunk or not self.drop_last:
                    yield self._portion(samples, position, is_first=position == self.first + len(samples))

    def _portion(self, samples: list[Any], position: int, *, is_first: bool) -> StreamBatch:
        if not self.is_shared:
            return StreamBatch(self.collate_fn(samples), len(samples), len(samples))
        offset, count = even_split(len(samples), self.shard.count, self.shard.index)
        own = samples[offset : offset + count] or samples[:1]
        begins_with = digest(samples[:COMPARED_SAMPLES], of_others=_kind) if is_first else 0
        return StreamBatch(self.collate_fn(own), count, len(samples), position, begins_with)


def spans_of(dataset: Any) -> Iterable[Iterable[Any]]:
    """Return what is split into batches in turn: the dataset, or the spans of a pipeline."""
    spans: Iterable[Iterable[Any]] = dataset.spans() if hasattr(dataset, "spans") else (dataset,)
    return spans


def agree(
    batches: Iterator[StreamBatch], shard: DataShard, *, is_shared: bool, first: int = 0, readers: int = 1
) -> Iterator[tuple[Any, BatchShare, int]]:
    """Yield (batch, share, position after it) until every rank is exhausted.

    A rank that is exhausted first repeats its last batch, which then counts 0 samples.
    Collective at every batch if the shards belong to ranks of this job.

    Args:
        batches: The batches that this rank loads.
        shard: Which part of how many that is.
        is_shared: Whether all ranks read the same samples.
        first: Position before the first batch.
        readers: Worker processes per rank that read their own streams, whose batches arrive in turn.

    Raises:
        DataError: On every rank, if a shared stream differs between ranks, a rank's own stream is empty,
            or the own streams of ranks or workers began with the same samples.
    """
    last: Any = None
    position, firsts = first, dict[int, tuple[int, int]]()
    for step in itertools.count():
        batch = next(batches, None)
        own = _summarize(batch, is_compared=step < readers, is_shared=is_shared)
        answers = gather_integers(own) if shard.is_checked else [own]
        check_answers(answers, step, is_shared)
        if not is_shared:
            check_beginnings(answers, step, firsts)
        elif len({answer[3] for answer in answers}) > 1 and shard.index == 0:
            logger.warning(
                "the ranks read different samples from a stream that they share: samples may be trained on twice or "
                "never. Let it yield the same samples on every rank (seed its random numbers)"
            )
        if not any(answer[2] for answer in answers):
            return
        last = _clone_batch(last) if batch is None else batch.batch
        rows = 0 if batch is None else batch.rows
        global_rows = own[1] if is_shared else sum(answer[0] for answer in answers)
        position = batch.position if is_shared and batch is not None else position + global_rows
        yield last, BatchShare(rows, global_rows), position


def _clone_batch(batch: Any) -> Any:
    """Return a copy of a batch that is yielded again, as every batch has its own memory."""
    return tree_map(lambda part: part.detach().clone() if isinstance(part, torch.Tensor) else part, batch)


def _summarize(portion: StreamBatch | None, *, is_compared: bool, is_shared: bool) -> list[int]:
    if portion is None:
        return [0, 0, 0, 0]
    begins_with = 0 if not is_compared else portion.begins_with if is_shared else digest(portion.batch)
    return [portion.rows, portion.global_rows, 1, begins_with]


def check_answers(answers: list[list[int]], step: int, is_shared: bool) -> None:
    """Raise `DataError` if the summaries of the ranks (see `_summarize`) show that their streams are wrong."""
    totals = [answer[1] for answer in answers]
    if is_shared and len(set(totals)) > 1:
        raise DataError(
            f"The ranks read different streams: at batch {step} they found {totals} samples (rank 0 first). "
            "Let the generator yield the same samples on every rank (seed its random numbers), or pass "
            'stream="own" if it splits itself over the ranks.'
        )
    if step > 0 or is_shared or not any(totals):
        return
    empty = [rank for rank, rows in enumerate(totals) if rows == 0]
    if empty:
        raise DataError(
            f'With stream="own" every rank needs samples, but the stream of rank {empty[0]} is empty. '
            "Split the data into at least as many parts as there are ranks."
        )


def check_beginnings(answers: list[list[int]], step: int, firsts: dict[int, tuple[int, int]]) -> None:
    """Raise `DataError` if an own stream of a rank, or of one of its workers, began like another.

    Args:
        answers: The summaries of all ranks, see `_summarize`; nothing is compared without a digest.
        step: Which batch that was: the workers' first ones come in turn.
        firsts: Digest -> (rank, worker) of the steps before; added to.
    """
    for rank, (*_, digest) in enumerate(answers):
        other, worker = firsts.setdefault(digest, (rank, step)) if digest else (rank, step)
        if (other, worker) != (rank, step):
            who = f"workers {worker} and {step} of rank {rank}" if other == rank else f"ranks {other} and {rank}"
            raise DataError(
                f'With stream="own" every rank and worker reads other samples, but {who} began with the same batch. '
                "Split "
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
