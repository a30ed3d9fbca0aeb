"""What the arguments of a loader come to: what it loads, in which order and how."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch

from phalanx.comm.context import BatchShare
from phalanx.data.loader.fetch import PipelineFetcher, RowFetcher, WorkLoader, load_portions
from phalanx.data.pipeline.order import Ordering, PipelineOrder, Window
from phalanx.data.pipeline.pipeline import Pipeline, Verbs
from phalanx.data.pipeline.stream import PipelineStream
from phalanx.data.samples.bad_records import counted
from phalanx.data.samples.sources import Source, batch_sizes, decides_batches, read_source
from phalanx.data.sampling.loader_seed import LoaderSeed
from phalanx.data.sampling.order import BatchOrder, Order, RowOrder
from phalanx.data.sampling.ranks import Shard, place, shard_here
from phalanx.data.sampling.seeding import seeded
from phalanx.data.sampling.shuffle import mixed_seed
from phalanx.data.stream.generator import GeneratorDataset
from phalanx.data.stream.stream import PortionDataset, agree
from phalanx.errors import ConfigError, did_you_mean

logger = logging.getLogger("phalanx.data")

_T = TypeVar("_T")
_PASSED_ON = {
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
}
_ARGUMENTS = {"batch_size", "global_batch", "shuffle", "seed", "drop_last", "collate_fn", "num_workers", "training"}


class Loading:
    """A loader's arguments, checked, and the epochs they mean. See `ShardedLoader` for the arguments."""

    def __init__(
        self,
        data: Any,
        *,
        batch_size: int | None,
        global_batch: int | None,
        shuffle: bool | None,
        seed: int | None,
        drop_last: bool | None,
        collate_fn: Callable[[list[Any]], Any] | None,
        num_workers: int | None,
        training: bool,
        stream: Literal["shared", "own"],
        shard: tuple[int, int] | None,
        passed_on: dict[str, Any],
    ) -> None:
        self.pipeline = _pipeline_of(data)
        self.source = source = read_source(data) if self.pipeline is None else _source_of(self.pipeline)
        _check_passed_on(passed_on)
        if stream not in ("shared", "own"):
            raise ConfigError(f"Asked for stream={stream!r}. Give 'shared' or 'own'.")
        source.loading |= passed_on
        source.num_workers = _first(num_workers, source.num_workers)
        self.training = training
        self._shard = _read_shard(shard)
        says = self.pipeline or source.dataset
        self._asked_shard = says.shard if isinstance(says, Verbs) else None
        self.is_own = stream == "own" or decides_batches(source.dataset)
        self._rows_per_rank, self._global_batch = batch_sizes(source, batch_size, global_batch)
        if self.pipeline is not None:
            _say_other_batches(self.pipeline, batch_size=batch_size, global_batch=global_batch)
        kind = type(source.dataset).__name__
        self.seed = LoaderSeed(_first(seed, source.seed), source.generators, training=training, kind=kind)
        self.drop_last = _first(drop_last, _first(source.drop_last, False))
        self._shuffle = _first(shuffle, _first(source.shuffle, training and not source.is_stream))
        self._check_shuffle(shuffle)
        if self.pipeline is not None and collate_fn is not None:
            raise ConfigError("Asked for a collate_fn, but a pipeline makes its batches. Map its columns instead.")
        self._rows = RowFetcher(source.dataset, collate_fn or source.collate_fn)
        self._works = WorkLoader(self._rows if self.pipeline is None else PipelineFetcher(self.pipeline))

    @property
    def order(self) -> Order | None:
        """What says which rows each batch of an epoch that begins now holds; None for streams.

        Made anew each time: a dataset may grow and a sampler list another number of rows from epoch to epoch.
        """
        return None if self.source.is_stream else self._make_order()

    def here(self) -> Shard:
        """Return which part of every global batch this process loads."""
        return self._shard or shard_here(self._asked_shard, training=self.training)

    def global_batch_for(self, count: int) -> int:
        """Return the rows of a full global batch for `count` shards; batches when a batch sampler cuts them."""
        if self.source.batch_sampler is not None:
            return count
        return self._global_batch or self._rows_per_rank * count

    def keep_global_batch(self, ranks: int | None) -> None:
        """Let a size per rank stand for the rows that it means for so many ranks, or now, whoever reads them later."""
        if self.source.batch_sampler is None:
            count = self.here().count if ranks is None or self._shard is not None else ranks
            self._global_batch = self.global_batch_for(count)

    def steps(self, count: int) -> int:
        """Return the batches of a whole epoch for `count` shards.

        Raises:
            TypeError: If the data is a stream without a length.
        """
        if (order := self.order) is not None:
            return order.steps(count)
        try:
            rows = len(self.source.dataset)
        except TypeError:
            raise TypeError("A stream has no length. Iterate over it, or give its dataset a __len__.") from None
        ordering, batch = self._ordering(), self.global_batch_for(count)
        span = rows * ordering.joined
        return ordering.spans * (span // batch if self.drop_last else -(-span // batch))

    def shares(self) -> tuple[BatchShare, ...]:
        """Return what the batches of this process are of the global batches; none for what is not known before."""
        order = self.order
        return () if order is None else order.shares(self.here())

    def batches(self, epoch: int, first: int) -> Iterator[tuple[Any, BatchShare, int]]:
        """Yield (batch, share, position after it) of an epoch from position `first` on.

        Collective for streams (at every batch), for custom samplers and for readers that skip broken records (at the
        first batch), else local.
        """
        here, order = self.here(), self.order
        found = self._portions(here, epoch, first) if order is None else self._rows_of(order, here, epoch, first)
        return counted(self.source.dataset, found, here, is_own=self.is_own)

    def first_batch(self, epoch: int) -> tuple[Any, BatchShare]:
        """Return the first batch of an epoch and its share, loaded in this process; collective as `batches` is.

        Random numbers are as they were afterwards.

        Raises:
            ConfigError: If there is none.
        """
        here, order = self.here(), self.order
        with seeded(mixed_seed(self.seed(), epoch)):
            if order is None:
                for batch, share, _ in self._portions(here, epoch, 0):
                    return batch, share
            else:
                for batch, work in self._works.load(order.works(epoch, here, 0), {"num_workers": 0}):
                    return batch, work.share
        raise ConfigError("Asked for the first batch of data that has no row. Give data with rows.")

    def rows(self) -> int | None:
        """Return the rows of one pass; None for streams and where a sampler decides."""
        source = self.source
        if source.is_stream or source.sampler is not None or source.batch_sampler is not None:
            return None
        return len(source.dataset)

    def describe_order(self) -> str | None:
        """Return what a pipeline does to the order, None for other data."""
        return None if self.pipeline is None else str(self._ordering())

    # -- parts -------------------------------------------------------------------------------------------------

    def _rows_of(self, order: Order, here: Shard, epoch: int, first: int) -> Iterator[tuple[Any, BatchShare, int]]:
        works = order.works(epoch, here, first)
        for batch, work in self._works.load(works, self._worker_options(epoch, here.index)):
            yield batch, work.share, work.position

    def _portions(self, here: Shard, epoch: int, first: int) -> Iterator[tuple[Any, BatchShare, int]]:
        dataset, collate = self.source.dataset, self._rows.collate_fn
        if self.pipeline is not None:
            dataset = PipelineStream(self.pipeline, self._ordering(), self.seed(), epoch, here if self.is_own else None)
            collate = dataset.collate
        portions = PortionDataset(
            dataset,
            collate,
            here,
            global_batch=self.global_batch_for(here.count),
            drop_last=self.drop_last,
            is_shared=not self.is_own,
            first=first,
        )
        options = self._stream_options(epoch, here, portions.chunk)
        loaded = load_portions(portions, options)
        readers = max(options["num_workers"], 1)
        return agree(loaded, here, is_shared=not self.is_own, first=first, readers=readers)

    def _stream_options(self, epoch: int, here: Shard, chunk: int) -> dict[str, Any]:
        # Ranks that read the same rows draw the same random numbers, so that these rows are the same.
        options = self._worker_options(epoch, here.index if self.is_own else 0)
        dataset = self.source.dataset
        if isinstance(dataset, GeneratorDataset) and dataset.process:
            options["num_workers"] = max(options["num_workers"], 1)
            options["prefetch_factor"] = max(dataset.capacity // (chunk * options["num_workers"]), 1)
        if not self.is_own:
            # Each worker would read the whole stream, and a dataset that splits itself over workers would lose
            # rows; one worker reads ahead just as well.
            options["num_workers"] = min(options["num_workers"], 1)
        return options

    def _worker_options(self, epoch: int, rank: int) -> dict[str, Any]:
        # torch seeds worker processes from this generator, so neither two ranks nor two epochs draw alike.
        generator = torch.Generator().manual_seed(mixed_seed(self.seed(), epoch, rank))
        return {**self.source.loading, "num_workers": self.source.num_workers, "generator": generator}

    def _make_order(self) -> Order:
        source = self.source
        if source.batch_sampler is not None:
            return BatchOrder(batch_sampler=source.batch_sampler, seed=self.seed)
        if self.pipeline is not None:
            return PipelineOrder(
                rows=len(source.dataset),
                ordering=self._ordering(),
                global_batch=self.global_batch_for,
                seed=self.seed,
                drop_last=self.drop_last,
            )
        return RowOrder(
            rows=len(source.dataset if source.sampler is None else source.sampler),
            global_batch=self.global_batch_for,
            seed=self.seed,
            shuffle=self._shuffle,
            drop_last=self.drop_last,
            sampler=source.sampler,
        )

    def _ordering(self) -> Ordering:
        """Return what the pipeline says, and `shuffle` about it."""
        if self.pipeline is None:
            return Ordering()
        said = self.pipeline.recipe.ordering
        if not self._shuffle:
            return replace(said, row_windows=(), unit_windows=())
        if said.shuffles or self.source.is_stream:
            return said
        return replace(said, row_windows=(Window(len(self.source.dataset), 0),))

    def _check_shuffle(self, shuffle: bool | None) -> None:
        sampler = self.source.sampler or self.source.batch_sampler
        if shuffle is not None and sampler is not None:
            raise ConfigError(
                f"Asked for shuffle={shuffle}, but the DataLoader's {type(sampler).__name__} decides the order. "
                "Leave shuffle out, or give a DataLoader without the sampler."
            )
        if shuffle and self.source.is_stream and not self._ordering().shuffles:
            raise ConfigError(
                "Asked to shuffle a stream, whose rows come in the order it yields them. Shuffle inside the generator "
                "or within windows, Pipeline(...).shuffle(buffer_size), or give a dataset with a length."
            )


def _pipeline_of(data: Any) -> Pipeline | None:
    """Return the pipeline that data is, or has to be because its columns are named; None for any other data."""
    return data.pipeline() if isinstance(data, Pipeline | GeneratorDataset) else None


def _source_of(pipeline: Pipeline) -> Source:
    source = read_source(pipeline.dataset)
    recipe = pipeline.recipe
    source.batch_size, source.global_batch = recipe.batch_size, recipe.global_batch
    source.drop_last = recipe.drop_remainder
    source.shuffle = True if recipe.ordering.shuffles else None
    return source


def _say_other_batches(pipeline: Pipeline, **asked: int | None) -> None:
    recipe = pipeline.recipe
    said = {"batch_size": recipe.batch_size, "global_batch": recipe.global_batch}
    if recipe.is_batched and any(asked.values()) and asked != said and place()[0] == 0:
        ours, theirs = (next(f"{name}={rows}" for name, rows in sizes.items() if rows) for sizes in (asked, said))
        logger.warning(
            "batches are cut with %s, as the loader was asked, not with the pipeline's batch(%s)", ours, theirs
        )


def _first(said: _T | None, otherwise: _T) -> _T:
    return otherwise if said is None else said


def _check_passed_on(loading: dict[str, Any]) -> None:
    for name in loading.keys() - _PASSED_ON:
        raise ConfigError(
            f"ShardedLoader has no argument {name!r}.{did_you_mean(name, _PASSED_ON | _ARGUMENTS)} "
            f"Those of torch's DataLoader that it passes on are {', '.join(sorted(_PASSED_ON))}."
        )


def _read_shard(shard: tuple[int, int] | None) -> Shard | None:
    if shard is None:
        return None
    index, count = shard
    if not 0 <= index < count:
        raise ConfigError(f"Asked for shard {index} of {count}. Give an index from 0 to count - 1.")
    return Shard(index, count, is_checked=False)
