"""`Pipeline`: `dataset.map(...).shuffle(...).batch(...).repeat(...)`, in any order.

dataset = Cifar10Dataset(path).map(vision.RandomHorizontalFlip(), "image").shuffle(10_000).batch(32)
for image, label in ShardedLoader(dataset): ...

A pipeline is a value: every method returns a new one, and nothing is read before a loader iterates. How they define
the order is in `docs/design/data.md`; columns in `data/pipeline/columns.py`.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from phalanx.data.pipeline.columns import Columns, collate_named, names_of, read_columns
from phalanx.data.pipeline.maps import Map, build_map
from phalanx.data.pipeline.order import Ordering, Window
from phalanx.data.samples.data_source import decides_batches, read_source
from phalanx.data.sampling.order import BatchRequest
from phalanx.data.sampling.ranks import expected_shard_count, read_shard
from phalanx.data.sampling.shards import EpochPlan, read_count
from phalanx.errors import ConfigError
from phalanx.old_names import replacement

Operations = Callable[..., Any] | Sequence[Callable[..., Any]]
Names = str | Sequence[str]
P = ParamSpec("P")
R = TypeVar("R")


def _hint_at_renamed_arguments(verb: Callable[P, R]) -> Callable[P, R]:
    """Let a method that gets an argument of another framework raise an error that names ours."""

    @functools.wraps(verb)
    def wrapper(*args: P.args, **named: P.kwargs) -> R:
        for word in named:
            if word not in inspect.signature(verb).parameters and (instead := replacement(word)):
                raise ConfigError(f"{verb.__name__} has no argument {word!r}. {instead}.")
        return verb(*args, **named)

    return wrapper


class PipelineMethods:
    """The methods of a pipeline, shared by readers: each returns a new `Pipeline`."""

    shard: tuple[int, int] | None = None
    """(index, count) from `num_shards` and `shard_id`; None: that of the rank."""

    if not TYPE_CHECKING:  # a type checker would accept every name

        def __getattr__(self, name: str) -> NoReturn:
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if old := replacement(name):
                raise AttributeError(f"{message}. {old}.", name=name)
            raise AttributeError(message, name=name, obj=self)  # Python adds the nearest name

    def pipeline(self) -> Pipeline:
        """Return the pipeline so far; for a dataset, one that only reads it."""
        return Pipeline(self)

    @_hint_at_renamed_arguments
    def map(
        self, operations: Operations, input_columns: Names | None = None, *, output_columns: Names | None = None
    ) -> Pipeline:
        """Apply operations to a column: to every sample before `batch`, to this rank's part of the batch after it.

        Transforms (`phalanx.data.vision`) work on all samples at once, any other callable on one sample at a time
        (after `batch`: on the batch). Their random numbers (torch, NumPy, `random` or `Draws`) depend only on (seed,
        pass, sample), not on ranks, workers and batch size.

        Args:
            operations: One or a list of them, applied in order.
            input_columns: The first column when omitted. With several, operations take all values and return as many.
            output_columns: Names of the results, if they or their number differ from the inputs.

        Raises:
            ConfigError: If a column does not exist or an operation cannot be called.
        """
        pipeline = self.pipeline()
        recipe = pipeline.recipe
        step = build_map(
            operations,
            input_columns,
            output_columns,
            recipe.columns,
            number=len(recipe.maps),
            per_batch=recipe.is_batched,
        )
        return pipeline.then(maps=(*recipe.maps, step), columns=step.names(recipe.columns))

    @_hint_at_renamed_arguments
    def shuffle(self, buffer_size: int, seed: int = 0) -> Pipeline:
        """Shuffle every pass within windows: samples, or after `batch` whole batches of this many samples.

        Args:
            buffer_size: Elements of a window; none moves more than `buffer_size` - 1 places forward. The length of the
                data, or more, is a full shuffle. Costs no memory unless the data is a stream.
            seed: Combined with the seed of the loader.
        """
        pipeline = self.pipeline()
        ordering = pipeline.recipe.ordering
        number = len(ordering.row_windows) + len(ordering.unit_windows)
        window = Window(read_count("buffer_size", buffer_size), number, seed)
        if pipeline.recipe.is_batched:
            return pipeline.then(ordering=replace(ordering, unit_windows=(*ordering.unit_windows, window)))
        return pipeline.then(ordering=replace(ordering, row_windows=(*ordering.row_windows, window)))

    @_hint_at_renamed_arguments
    def batch(
        self, batch_size: int | None = None, drop_remainder: bool = False, *, global_batch: int | None = None
    ) -> Pipeline:
        """Group samples into batches.

        Args:
            batch_size: Samples per rank.
            drop_remainder: Whether to drop a last global batch that is not full.
            global_batch: Samples over all ranks instead: the same batches for any number of ranks.
        """
        pipeline = self.pipeline()
        if pipeline.recipe.is_batched:
            raise ConfigError(
                f"Asked to batch twice: {pipeline!r} is of batches already. Batch once, and reshape with map if needed."
            )
        if (batch_size is None) == (global_batch is None):
            raise ConfigError(
                "Give batch a batch_size= (samples per rank) or a global_batch= (over all), and not both."
            )
        size = {"batch_size": batch_size} if global_batch is None else {"global_batch": global_batch}
        sizes = {name: read_count(name, count) for name, count in size.items()}
        ordering = replace(pipeline.recipe.ordering, unit=next(iter(sizes.values())))
        return pipeline.then(**sizes, drop_remainder=bool(drop_remainder), ordering=ordering)

    @_hint_at_renamed_arguments
    def repeat(self, count: int) -> Pipeline:
        """Repeat the data `count` times per epoch; before `batch`, batches may span two passes."""
        pipeline = self.pipeline()
        ordering, times = pipeline.recipe.ordering, read_count("count", count)
        if pipeline.recipe.is_batched:
            return pipeline.then(ordering=replace(ordering, spans=ordering.spans * times))
        return pipeline.then(ordering=replace(ordering, joined=ordering.joined * times))


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The settings of a pipeline."""

    columns: tuple[str, ...]
    """The columns after all maps."""

    maps: tuple[Map, ...] = ()
    ordering: Ordering = field(default_factory=Ordering)
    batch_size: int | None = None
    """Samples per rank."""

    global_batch: int | None = None
    """Samples over all ranks instead."""

    drop_remainder: bool = False
    gives_dicts: bool = False

    @property
    def is_batched(self) -> bool:
        """Whether `batch` was applied."""
        return self.batch_size is not None or self.global_batch is not None


class Pipeline(PipelineMethods):
    """What to read and how to transform it; accepted wherever data is.

    Args:
        data: A torch Dataset or IterableDataset, a tuple of tensors or arrays, a reader of ours or a function that
            returns a new iterator of samples.
        columns: The names of a sample's parts, or the keys to take of dictionaries. Needed for streams; otherwise
            the reader's own, a dictionary's keys, or column0, column1, ...
        num_shards: Load as one of this many ranks instead of this job's; with `shard_id`.
        shard_id: Which of them, from 0.

    Raises:
        ConfigError: If the data cannot be sharded over ranks, or names or shards do not fit.
    """

    def __init__(
        self, data: Any, columns: Names | None = None, *, num_shards: int | None = None, shard_id: int | None = None
    ) -> None:
        source = read_source(data)
        if source.batch_size is not None or source.batch_sampler is not None:
            raise ConfigError(
                "Asked for a pipeline of a DataLoader, which cuts batches itself. Give its dataset, and say "
                ".shuffle(...).batch(...) here."
            )
        if decides_batches(source.dataset):
            raise ConfigError(
                f"Asked for a pipeline of {type(source.dataset).__name__}, which hands out batches. Give it to "
                "ShardedLoader, and change the batches in the training loop."
            )
        self.dataset = source.dataset
        self.names = names_of(self.dataset, columns, is_stream=source.is_stream)
        """The columns before all maps."""
        self.shard = read_shard(num_shards, shard_id) or getattr(data, "shard", None)
        self.recipe = Recipe(columns=self.names)

    def then(self, **changes: Any) -> Pipeline:
        """Return this pipeline with changed fields of the recipe."""
        new = copy.copy(self)
        new.recipe = replace(self.recipe, **changes)
        return new

    def pipeline(self) -> Pipeline:
        """See `PipelineMethods`."""
        return self

    def __iter__(self) -> NoReturn:
        raise TypeError(
            "A pipeline says what to load and does not load itself. Iterate over ShardedLoader(dataset), or give it to "
            "px.distribute, px.evaluate or px.Model."
        )

    def as_dicts(self) -> Pipeline:
        """Yield batches as dictionaries by column, instead of lists in the order of the columns."""
        return self.then(gives_dicts=True)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a batch, in order."""
        return self.recipe.columns

    @property
    def is_batched(self) -> bool:
        """Whether `batch` was applied."""
        return self.recipe.is_batched

    def one_pass(self) -> Pipeline:
        """Return the pipeline without `repeat`: each epoch is one pass over the data."""
        return self.then(ordering=replace(self.recipe.ordering, joined=1, spans=1))

    @property
    def num_classes(self) -> int | None:
        """Number of classes of the labels, if the dataset has it."""
        return getattr(self.dataset, "num_classes", getattr(self.dataset, "class_dim", None))

    def get_dataset_size(self) -> int:
        """Return the batches of one pass on every rank; before `batch`, the samples of a rank.

        Raises:
            ConfigError: If the data is a stream without a length.
        """
        try:
            rows = len(self.dataset)
        except TypeError:
            raise ConfigError(
                f"{type(self.dataset).__name__} is a stream without a length, so the batches of a pass are not known. "
                "Give it a __len__, or count them once."
            ) from None
        recipe, count = self.recipe, expected_shard_count(self.shard)
        return EpochPlan(rows, recipe.global_batch or (recipe.batch_size or 1) * count, recipe.drop_remainder).steps

    def fetch(self, work: BatchRequest) -> Any:
        """Return the batch of a `BatchRequest`, for data with a length."""
        indices = np.asarray(work.indices, np.int64)
        assert work.sample_seeds is not None
        return self.finish(read_columns(self.dataset, self.names, indices, work.seed), work.sample_seeds)

    def finish(self, columns: Columns, seeds: NDArray[np.uint64]) -> Any:
        """Return a batch of this pipeline from raw samples.

        Args:
            columns: The columns of n samples before all maps.
            seeds: Seed of each sample, shape (n,).
        """
        for step in (step for step in self.recipe.maps if not step.per_batch):
            columns = step.apply(columns, seeds)
        batch = {name: collate_named(name, column) for name, column in columns.items()}
        for step in (step for step in self.recipe.maps if step.per_batch):
            batch = step.apply(batch, seeds)
        return batch if self.recipe.gives_dicts else list(batch.values())

    def __repr__(self) -> str:
        recipe, sizes = self.recipe, {"a rank": self.recipe.batch_size, "over all ranks": self.recipe.global_batch}
        batches = [f"batches of {count} samples {of_whom}" for of_whom, count in sizes.items() if count]
        parts = [", ".join(recipe.columns), str(recipe.ordering), *batches]
        return f"Pipeline({type(self.dataset).__name__}: {'; '.join(parts)})"
