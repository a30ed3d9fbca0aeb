"""`LoaderOptions`: the validated arguments of a `ShardedLoader`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch

from phalanx.comm import context
from phalanx.comm.batch.replicas import Replicas
from phalanx.comm.context import BatchShare
from phalanx.data.loader.fetch import PipelineFetcher, RequestLoader, SampleFetcher, load_stream
from phalanx.data.loader.leased_requests import BatchSource, leased_requests
from phalanx.data.pipeline.order import Ordering, PipelineOrder, Window
from phalanx.data.pipeline.pipeline import Pipeline, PipelineMethods
from phalanx.data.pipeline.stream import PipelineStream
from phalanx.data.samples.bad_records import report_bad_records
from phalanx.data.samples.data_source import DataSource, batch_sizes, decides_batches, read_source
from phalanx.data.sampling.loader_seed import LoaderSeed
from phalanx.data.sampling.order import BatchOrder, EpochOrder, SampleOrder
from phalanx.data.sampling.ranks import DataShard, current_shard, resolve_shard
from phalanx.data.sampling.seeding import seeded
from phalanx.data.sampling.shuffle import mixed_seed
from phalanx.data.stream.generator_dataset import GeneratorDataset
from phalanx.data.stream.stream_batches import StreamBatches, agree
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


class LoaderOptions:
    """A loader's checked arguments, and the epochs they define. See `ShardedLoader` for the arguments."""

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
        self._loader_number: int | None = None
        """What this loader is called where batches are leased."""

        self.returns = 0
        """How often the loader was sent back to samples that it had read."""

        says = self.pipeline or source.dataset
        self._requested_shard = says.shard if isinstance(says, PipelineMethods) else None
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
        self._rows = SampleFetcher(source.dataset, collate_fn or source.collate_fn)
        self._request_loader = RequestLoader(self._rows if self.pipeline is None else PipelineFetcher(self.pipeline))

    @property
    def order(self) -> EpochOrder | None:
        """The order of the samples of an epoch that begins now; None for streams.

        Rebuilt each time: the length of a dataset or sampler may change from epoch to epoch.
        """
        return None if self.source.is_stream else self._make_order()

    def here(self) -> DataShard:
        """Return which part of every global batch this process loads."""
        shard = self._shard or resolve_shard(self._requested_shard, training=self.training)
        return shard if shard.split is None else replace(shard, returns=self.returns)

    def global_batch_for(self, count: int) -> int:
        """Return the samples of a full global batch for `count` shards; batches if a batch sampler makes them."""
        if self.source.batch_sampler is not None:
            return count
        return self._global_batch or self._rows_per_rank * count

    def keep_global_batch(self, ranks: int | None) -> None:
        """Fix the global batch at what it is for this many ranks, or now, however many read later."""
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
        """Return the shares of this process in the global batches; empty if not known in advance."""
        order = self.order
        return () if order is None else order.shares(self.here())

    def batches(self, epoch: int, first: int) -> Iterator[tuple[Any, BatchShare, int]]:
        """Yield (batch, share, position after it) of an epoch from position `first` on.

        Collective for streams (at every batch), for custom samplers and for readers that skip broken records (at the
        first batch), else local.
        """
        shard, order = self.here(), self.order
        if shard.split is not None and (order is None or self.source.batch_sampler is not None):
            what = "a stream" if order is None else "a batch sampler"
            raise ConfigError(
                f'Asked for balance="samples" with {what}, whose batches are not cut here by the speed of ranks. Give '
                "a dataset with a length and a batch size, or leave balance out."
            )
        parts = (
            self._stream_batches(shard, epoch, first)
            if order is None
            else self._sample_batches(order, shard, epoch, first)
        )
        return report_bad_records(self.source.dataset, parts, shard, is_own=self.is_own)

    @contextlib.contextmanager
    def pinned(self, replicas: Replicas) -> Iterator[None]:
        """Keep replicas on their ranks inside the block if workers request batches ahead of their turns.

        In an elastic job they move all the same, and the batches are requested anew.
        """
        if not self.source.num_workers or replicas.is_elastic:
            yield
            return
        replicas.pin()
        try:
            yield
        finally:
            replicas.unpin()

    def first_batch(self, epoch: int) -> tuple[Any, BatchShare]:
        """Return the first batch of an epoch and its share, loaded in this process; collective as `batches` is.

        Random state is restored afterwards.

        Raises:
            ConfigError: If there is none.
        """
        shard, order = self.here(), self.order
        with seeded(mixed_seed(self.seed(), epoch)):
            if order is None:
                for batch, share, _ in self._stream_batches(shard, epoch, 0):
                    return batch, share
            else:
                for batch, work in self._request_loader.load(order.requests(epoch, shard, 0), {"num_workers": 0}):
                    return batch, work.share
        raise ConfigError("Asked for the first batch of data that has no sample. Give data with samples.")

    def batch_of(self, epoch: int, first: int, replica: int, count: int) -> tuple[Any, BatchShare, int]:
        """Return a logical replica's batch of the global batch at a position, its share, and the position after it.

        Loaded in this process. Not collective.

        Args:
            epoch: Which epoch.
            first: Where the global batch begins.
            replica: The replica, of `count`.
            count: All replicas.

        Raises:
            ConfigError: If the data is a stream.
        """
        order = self.order
        if order is None:
            raise ConfigError(
                "a rank was lost, and its part of a stream cannot be read again. Give a dataset with a length where "
                "ranks may leave and join."
            )
        requests = order.requests(epoch, DataShard(replica, count, is_checked=False), first)
        batch, request = next(self._request_loader.load(requests, {"num_workers": 0}))
        return batch, request.share, request.position

    def sample_ids(self, epoch: int, first: int, part: int) -> list[int] | None:
        """Return the dataset indices of a part of the global batch at a position; None where they are not computed."""
        order, shard = self.order, self.here()
        if not isinstance(order, SampleOrder) or order.sampler is not None:
            return None
        alone = replace(shard, index=part, replicas=None)
        request = next(order.requests(epoch, alone, first), None)
        return None if request is None else [int(index) for index in request.indices]

    def rows(self) -> int | None:
        """Return the samples of one pass; None for streams and where a sampler decides."""
        source = self.source
        if source.is_stream or source.sampler is not None or source.batch_sampler is not None:
            return None
        return len(source.dataset)

    def describe_order(self) -> str | None:
        """Return the order of a pipeline as text, None for other data."""
        return None if self.pipeline is None else str(self._ordering())

    # -- parts -------------------------------------------------------------------------------------------------

    @property
    def batch_source(self) -> BatchSource | None:
        """Who leases the batches of this loader to workers that come and go; None in any other job."""
        if not (self.training and context.is_initialized()) or self._shard is not None:
            return None
        batch_source: BatchSource | None = context.current().batch_source
        return None if self.source.is_stream or self.pipeline is not None else batch_source

    def _leased_batches(
        self, order: EpochOrder, shard: DataShard, epoch: int, batch_source: BatchSource
    ) -> Iterator[tuple[Any, BatchShare, int]]:
        options = self._worker_options(epoch, shard.index)
        is_begun = not (options["num_workers"] or options.get("pin_memory"))  # else batches are read ahead
        if self._loader_number is None:
            self._loader_number = batch_source.number_loader()
        lease = partial(batch_source.lease, self._loader_number, count=1, is_begun=is_begun)
        requests = leased_requests(order, self.global_batch_for, lease, epoch, shard.count)
        for batch, work in self._request_loader.load(requests, options):
            if not is_begun and work.lease is not None:
                batch_source.begin(self._loader_number, *work.lease)
            yield batch, work.share, work.position

    def _sample_batches(
        self, order: EpochOrder, shard: DataShard, epoch: int, first: int
    ) -> Iterator[tuple[Any, BatchShare, int]]:
        if (batch_source := self.batch_source) is not None:
            yield from self._leased_batches(order, shard, epoch, batch_source)
            return
        requests = order.requests(epoch, shard, first)
        for batch, work in self._request_loader.load(requests, self._worker_options(epoch, shard.index)):
            yield batch, work.share, work.position

    def _stream_batches(self, shard: DataShard, epoch: int, first: int) -> Iterator[tuple[Any, BatchShare, int]]:
        if len(shard.parts) > 1:
            raise ConfigError(
                f"Asked to load a stream for {len(shard.parts)} logical replicas on one rank, but a stream is "
                "read once, in order. Start as many ranks as there are replicas, or give a dataset with a length."
            )
        dataset, collate = self.source.dataset, self._rows.collate_fn
        if self.pipeline is not None:
            dataset = PipelineStream(
                self.pipeline, self._ordering(), self.seed(), epoch, shard if self.is_own else None
            )
            collate = dataset.collate
        batches = StreamBatches(
            dataset,
            collate,
            shard,
            global_batch=self.global_batch_for(shard.count),
            drop_last=self.drop_last,
            is_shared=not self.is_own,
            first=first,
        )
        options = self._stream_options(epoch, shard, batches.chunk)
        loaded = load_stream(batches, options)
        readers = max(options["num_workers"], 1)
        return agree(loaded, shard, is_shared=not self.is_own, first=first, readers=readers)

    def _stream_options(self, epoch: int, shard: DataShard, chunk: int) -> dict[str, Any]:
        # Ranks that read the same samples draw the same random numbers, so that these samples are the same.
        options = self._worker_options(epoch, shard.index if self.is_own else 0)
        dataset = self.source.dataset
        if isinstance(dataset, GeneratorDataset) and dataset.process:
            options["num_workers"] = max(options["num_workers"], 1)
            options["prefetch_factor"] = max(dataset.capacity // (chunk * options["num_workers"]), 1)
        if not self.is_own:
            # Each worker would read the full stream, and a dataset that splits itself over workers would lose
            # samples; one worker prefetches just as well.
            options["num_workers"] = min(options["num_workers"], 1)
        return options

    def _worker_options(self, epoch: int, rank: int) -> dict[str, Any]:
        # torch seeds worker processes from this generator, so neither two ranks nor two epochs draw alike.
        generator = torch.Generator().manual_seed(mixed_seed(self.seed(), epoch, rank))
        return {**self.source.loading, "num_workers": self.source.num_workers, "generator": generator}

    def _make_order(self) -> EpochOrder:
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
        return SampleOrder(
            rows=len(source.dataset if source.sampler is None else source.sampler),
            global_batch=self.global_batch_for,
            seed=self.seed,
            shuffle=self._shuffle,
            drop_last=self.drop_last,
            sampler=source.sampler,
        )

    def _ordering(self) -> Ordering:
        """Return the ordering of the pipeline, with `shuffle` applied."""
        if self.pipeline is None:
            return Ordering()
        ordering = self.pipeline.recipe.ordering
        if not self._shuffle:
            return replace(ordering, row_windows=(), unit_windows=())
        if ordering.shuffles or self.source.is_stream:
            return ordering
        return replace(ordering, row_windows=(Window(len(self.source.dataset), 0),))

    def _check_shuffle(self, shuffle: bool | None) -> None:
        sampler = self.source.sampler or self.source.batch_sampler
        if shuffle is not None and sampler is not None:
            raise ConfigError(
                f"Asked for shuffle={shuffle}, but the DataLoader's {type(sampler).__name__} decides the order. "
                "Leave shuffle out, or give a DataLoader without the sampler."
            )
        if shuffle and self.source.is_stream and not self._ordering().shuffles:
            raise ConfigError(
                "Asked to shuffle a stream, whose samples come in the order it yields them. Shuffle inside the "
                "generator or within windows, Pipeline(...).shuffle(buffer_size), or give a dataset with a length."
            )


def _pipeline_of(data: Any) -> Pipeline | None:
    """Return data as a pipeline if it is one or has named columns; None for any other data."""
    return data.pipeline() if isinstance(data, Pipeline | GeneratorDataset) else None


def _source_of(pipeline: Pipeline) -> DataSource:
    source = read_source(pipeline.dataset)
    recipe = pipeline.recipe
    source.batch_size, source.global_batch = recipe.batch_size, recipe.global_batch
    source.drop_last = recipe.drop_remainder
    source.shuffle = True if recipe.ordering.shuffles else None
    return source


def _say_other_batches(pipeline: Pipeline, **loader_sizes: int | None) -> None:
    recipe = pipeline.recipe
    recipe_sizes = {"batch_size": recipe.batch_size, "global_batch": recipe.global_batch}
    if recipe.is_batched and any(loader_sizes.values()) and loader_sizes != recipe_sizes and current_shard()[0] == 0:
        ours, theirs = (
            next(f"{name}={rows}" for name, rows in sizes.items() if rows) for sizes in (loader_sizes, recipe_sizes)
        )
        logger.warning("batches have %s, as passed to the loader, not the pipeline's batch(%s)", ours, theirs)


def _first(value: _T | None, default: _T) -> _T:
    return default if value is None else value


def _check_passed_on(loading: dict[str, Any]) -> None:
    for name in loading.keys() - _PASSED_ON:
        raise ConfigError(
            f"ShardedLoader has no argument {name!r}.{did_you_mean(name, _PASSED_ON | _ARGUMENTS)} "
            f"Of torch's DataLoader it accepts {', '.join(sorted(_PASSED_ON))}."
        )


def _read_shard(shard: tuple[int, int] | None) -> DataShard | None:
    if shard is None:
        return None
    index, count = shard
    if not 0 <= index < count:
        raise ConfigError(f"Asked for shard {index} of {count}. Give an index from 0 to count - 1.")
    return DataShard(index, count, is_checked=False)
