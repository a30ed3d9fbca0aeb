"""`GeneratorDataset`: samples of a Python generator, prefetched by a thread or a process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import get_worker_info

from phalanx.data.pipeline.columns import values_of
from phalanx.data.pipeline.pipeline import PipelineMethods
from phalanx.data.samples.data_source import FunctionStream
from phalanx.data.sampling.ranks import read_shard
from phalanx.data.sampling.shards import read_count
from phalanx.data.stream.prefetch_queue import PrefetchQueue
from phalanx.errors import ConfigError


class GeneratorDataset(PipelineMethods, FunctionStream):
    """A stream with named columns, from a function that returns a new iterator of samples at each call.

    Every epoch calls the function again. On several ranks each calls it, and keeps its part of every global batch:
    the function yields the same samples on every rank.

    Args:
        function: Yields dictionaries that hold the columns, or tuples with one value for each.
        columns: The names of the feeds, in the order of a batch. A sample that lacks one is an error that names it.
        capacity: Samples read ahead of the training at most; 0 reads them when they are needed. A process reads whole
            batches, and one at least. Leaving a loop early waits for the sample that is being read.
        process: Whether a process reads ahead, not a thread. For generators that compute in Python, or that draw
            from torch's, NumPy's or Python's global generators, which a thread would share with the training.
        num_shards: Load as one of this many ranks instead of this job's; with `shard_id`.
        shard_id: Which of them, from 0.

    Raises:
        ConfigError: If `function` is no function, or is one that was called already.
    """

    def __init__(
        self,
        function: Callable[[], Iterable[Any]],
        columns: str | Sequence[str],
        *,
        capacity: int = 32,
        process: bool = False,
        num_shards: int | None = None,
        shard_id: int | None = None,
    ) -> None:
        if not callable(function):
            raise ConfigError(
                f"Asked to read samples from a {type(function).__name__}. Give the function that makes the generator, "
                "without calling it, so that each epoch can start from its beginning."
            )
        super().__init__(function)
        self.column_names = (columns,) if isinstance(columns, str) else tuple(columns)
        self.capacity = 0 if capacity == 0 else read_count("capacity", capacity)
        self.process = process
        self.shard = read_shard(num_shards, shard_id)

    @property
    def description(self) -> str:
        """What the samples come from, for messages."""
        return f"the generator {getattr(self.function, '__name__', type(self.function).__name__)}"

    def __iter__(self) -> Iterator[Any]:
        if self.capacity == 0 or self.process or get_worker_info() is not None:
            return self._samples()
        return iter(PrefetchQueue(self._samples, self.capacity))

    def _samples(self) -> Iterator[list[Any]]:
        for row, sample in enumerate(self.function()):
            yield values_of(sample, self.column_names, row, self.description)
