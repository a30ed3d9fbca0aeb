"""Data pipelines: `dataset.map(...).shuffle(...).batch(...).repeat(...)`, in any order.

dataset = Cifar10Dataset(path).map(vision.RandomHorizontalFlip(), "image").shuffle(10_000).batch(32)
for image, label in ShardedLoader(dataset): ...

A pipeline is a value: every verb returns a new one, and nothing is read before a loader iterates. What the verbs mean
for the order is in `docs/design/data.md`; columns in `data/pipeline/columns.py`.
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

from phalanx.data.pipeline.columns import Columns, batched, names_of, read_columns
from phalanx.data.pipeline.maps import Map, checked_map
from phalanx.data.pipeline.order import Ordering, Window
from phalanx.data.samples.sources import decides_batches, read_source
from phalanx.data.sampling.order import Work
from phalanx.data.sampling.ranks import read_shard, shards_expected
from phalanx.data.sampling.shards import EpochPlan, asked_rows
from phalanx.errors import ConfigError
from phalanx.old_names import replacement

Operations = Callable[..., Any] | Sequence[Callable[..., Any]]
Names = str | Sequence[str]
P = ParamSpec("P")
R = TypeVar("R")


def _names_old_words(verb: Callable[P, R]) -> Callable[P, R]:
    """Let a verb that is given an argument of older frameworks say what to write instead."""

    @functools.wraps(verb)
    def checked(*args: P.args, **named: P.kwargs) -> R:
        for word in named:
            if word not in inspect.signature(verb).parameters and (instead := replacement(word)):
                raise ConfigError(f"{verb.__name__} has no argument {word!r}. {instead}.")
        return verb(*args, **named)

    return checked


class Verbs:
    """The verbs of a pipeline, for readers too: each returns a new `Pipeline`."""

    shard: tuple[int, int] | None = None
    """(index, count) the user gave with `num_shards` and `shard_id`; None: as the ranks read."""

    if not TYPE_CHECKING:  # a type checker would believe every name

        def __getattr__(self, name: str) -> NoReturn:
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if old := replacement(name):
                raise AttributeError(f"{message}. {old}.", name=name)
            raise AttributeError(message, name=name, obj=self)  # to which Python adds the nearest name

    def pipeline(self) -> Pipeline:
        """Return the pipeline so far; of a dataset, the one that only reads."""
        return Pipeline(self)

    @_names_old_words
    def map(
        self, operations: Operations, input_columns: Names | None = None, *, output_columns: Names | None = None
    ) -> Pipeline:
        """Apply operations to a column: to every row before `batch`, to this rank's part of the batch after it.

        Transforms (`phalanx.data.vision`) work on all rows at once, any other callable on one sample at a time (after
        `batch`: on the batch). What they draw from torch, NumPy, `random` or their `Draws` follows from (seed, pass,
        row), whatever the ranks, workers and batch size.

        Args:
            operations: One or a list of them, applied in order.
            input_columns: The first column when omitted. Of several, operations take all values and return as many.
            output_columns: What the results are called, when not as the inputs; or how many there are.

        Raises:
            ConfigError: If a column is not there or an operation cannot be called.
        """
        here = self.pipeline()
        recipe = here.recipe
        step = checked_map(
            operations,
            input_columns,
            output_columns,
            recipe.columns,
            number=len(recipe.maps),
            per_batch=recipe.is_batched,
        )
        return here.then(maps=(*recipe.maps, step), columns=step.names(recipe.columns))

    @_names_old_words
    def shuffle(self, buffer_size: int, seed: int = 0) -> Pipeline:
        """Order anew in every pass, within windows: rows, or after `batch` whole batches of this many rows.

        Args:
            buffer_size: Elements of a window; none leaves more than `buffer_size` - 1 places early. As many as there
                are, or more, is a whole shuffle. Costs no memory unless the data is a stream.
            seed: Beside the seed of the loader.
        """
        here = self.pipeline()
        ordering = here.recipe.ordering
        number = len(ordering.row_windows) + len(ordering.unit_windows)
        window = Window(asked_rows("buffer_size", buffer_size), number, seed)
        if here.recipe.is_batched:
            return here.then(ordering=replace(ordering, unit_windows=(*ordering.unit_windows, window)))
        return here.then(ordering=replace(ordering, row_windows=(*ordering.row_windows, window)))

    @_names_old_words
    def batch(
        self, batch_size: int | None = None, drop_remainder: bool = False, *, global_batch: int | None = None
    ) -> Pipeline:
        """Make batches.

        Args:
            batch_size: Rows per rank.
            drop_remainder: Whether to leave out a last batch, over all ranks, that is not full.
            global_batch: Rows over all ranks, instead: the same batches on any number of them.
        """
        here = self.pipeline()
        if here.recipe.is_batched:
            raise ConfigError(
                f"Asked to batch twice: {here!r} is of batches already. Batch once, and reshape with map if needed."
            )
        if (batch_size is None) == (global_batch is None):
            raise ConfigError("Give batch a batch_size= (rows per rank) or a global_batch= (over all), and not both.")
        size = {"batch_size": batch_size} if global_batch is None else {"global_batch": global_batch}
        sizes = {name: asked_rows(name, rows) for name, rows in size.items()}
        ordering = replace(here.recipe.ordering, unit=next(iter(sizes.values())))
        return here.then(**sizes, drop_remainder=bool(drop_remainder), ordering=ordering)

    @_names_old_words
    def repeat(self, count: int) -> Pipeline:
        """Go through the data `count` times per epoch; before `batch`, batches may run from one pass into the next."""
        here = self.pipeline()
        ordering, times = here.recipe.ordering, asked_rows("count", count)
        if here.recipe.is_batched:
            return here.then(ordering=replace(ordering, spans=ordering.spans * times))
        return here.then(ordering=replace(ordering, joined=ordering.joined * times))


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What was said of a pipeline, verb by verb."""

    columns: tuple[str, ...]
    """The columns after all maps."""

    maps: tuple[Map, ...] = ()
    ordering: Ordering = field(default_factory=Ordering)
    batch_size: int | None = None
    """Rows per rank."""

    global_batch: int | None = None
    """Rows over all ranks, instead."""

    drop_remainder: bool = False
    gives_dicts: bool = False

    @property
    def is_batched(self) -> bool:
        """Whether `batch` was said."""
        return self.batch_size is not None or self.global_batch is not None


class Pipeline(Verbs):
    """What to read and what to do to it; accepted wherever data is.

    Args:
        data: A torch Dataset or IterableDataset, a tuple of tensors or arrays, a reader of ours or a function that
            returns a new iterator of samples.
        columns: The names of a sample's parts, or the keys to take of dictionaries. Needed for streams; otherwise
            the reader's own, a dictionary's keys, or column0, column1, ...
        num_shards: Load as one of this many ranks instead of this job's; with `shard_id`.
        shard_id: Which of them, from 0.

    Raises:
        ConfigError: If the data cannot be shared out over ranks, or names or shards do not fit.
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

    def then(self, **said: Any) -> Pipeline:
        """Return this pipeline with one more verb, which changed these fields of the recipe."""
        new = copy.copy(self)
        new.recipe = replace(self.recipe, **said)
        return new

    def pipeline(self) -> Pipeline:
        """See `Verbs`."""
        return self

    def __iter__(self) -> NoReturn:
        raise TypeError(
            "A pipeline says what to load and does not load itself. Iterate over ShardedLoader(dataset), or give it to "
            "px.distribute, px.evaluate or px.Model."
        )

    def as_dicts(self) -> Pipeline:
        """Hand out batches as dictionaries by column, instead of lists in the order of the columns."""
        return self.then(gives_dicts=True)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a batch, in order."""
        return self.recipe.columns

    @property
    def is_batched(self) -> bool:
        """Whether `batch` was said."""
        return self.recipe.is_batched

    def one_pass(self) -> Pipeline:
        """Return the pipeline without `repeat`: each epoch is one pass over the data."""
        return self.then(ordering=replace(self.recipe.ordering, joined=1, spans=1))

    @property
    def num_classes(self) -> int | None:
        """How many classes the labels have, where the dataset says so."""
        return getattr(self.dataset, "num_classes", getattr(self.dataset, "class_dim", None))

    def get_dataset_size(self) -> int:
        """Return the batches of one pass on every rank; before `batch`, the rows of a rank.

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
        said, count = self.recipe, shards_expected(self.shard)
        return EpochPlan(rows, said.global_batch or (said.batch_size or 1) * count, said.drop_remainder).steps

    def fetch(self, work: Work) -> Any:
        """Return the batch of a `Work` of this pipeline's order, for data with a length."""
        rows = np.asarray(work.indices, np.int64)
        assert work.row_seeds is not None
        return self.finish(read_columns(self.dataset, self.names, rows, work.seed), work.row_seeds)

    def finish(self, columns: Columns, seeds: NDArray[np.uint64]) -> Any:
        """Return rows, as they were read, as this pipeline's batch.

        Args:
            columns: The columns of n rows before all maps.
            seeds: Where the random numbers of each row start, shape (n,).
        """
        for step in (step for step in self.recipe.maps if not step.per_batch):
            columns = step.apply(columns, seeds)
        batch = {name: batched(name, column) for name, column in columns.items()}
        for step in (step for step in self.recipe.maps if step.per_batch):
            batch = step.apply(batch, seeds)
        return batch if self.recipe.gives_dicts else list(batch.values())

    def __repr__(self) -> str:
        said, sizes = self.recipe, {"a rank": self.recipe.batch_size, "over all ranks": self.recipe.global_batch}
        batches = [f"batches of {rows} rows {of_whom}" for of_whom, rows in sizes.items() if rows]
        parts = [", ".join(said.columns), str(said.ordering), *batches]
        return f"Pipeline({type(self.dataset).__name__}: {'; '.join(parts)})"
