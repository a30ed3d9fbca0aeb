"""Loading the rows of a batch, in this process or in torch's workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset, default_collate

from phalanx.data.loader.worker import WorkerStart
from phalanx.data.pipeline.columns import samples_of
from phalanx.data.pipeline.pipeline import Pipeline
from phalanx.data.samples.collate import collate
from phalanx.data.sampling.order import Work, rows_of_tensor
from phalanx.data.sampling.seeding import seeded
from phalanx.data.stream.stream import Portion, PortionDataset


class RowFetcher(Dataset[Any]):
    """Turns a `Work` into its collated batch; workers get a copy of it."""

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None) -> None:
        self.dataset = dataset
        self.collate_fn = collate if collate_fn in (None, default_collate) else collate_fn
        # Indexing the tensors at once gives what taking rows and stacking them again would.
        self.is_tensors = type(dataset) is TensorDataset and self.collate_fn is collate

    def __getitems__(self, work: Work) -> Any:
        """Return the batch; torch's fetcher calls this with whatever the batch sampler yielded."""
        if self.is_tensors:
            return [rows_of_tensor(tensor, work.indices) for tensor in self.dataset.tensors]
        with seeded(work.seed):
            return self.collate_fn(self._samples(work))

    def _samples(self, work: Work) -> list[Any]:
        fetch_many = getattr(self.dataset, "__getitems__", None)
        if fetch_many is not None:
            samples: list[Any] = fetch_many(list(work.indices))
            return samples
        return samples_of(self.dataset, work.indices)


class PipelineFetcher(Dataset[Any]):
    """Turns a `Work` of a pipeline into its batch."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline

    def __getitems__(self, work: Work) -> Any:
        """See `RowFetcher`."""
        return self.pipeline.fetch(work)


class WorkLoader:
    """Loads works in order, in this process or in workers; persistent workers serve every epoch."""

    def __init__(self, fetcher: RowFetcher | PipelineFetcher) -> None:
        self._fetcher = fetcher
        self._sent = _Sent()
        self._kept: DataLoader[Any] | None = None

    def load(self, works: Iterator[Work], options: dict[str, Any]) -> Iterator[tuple[Any, Work]]:
        """Yield (batch, work) for each work, in order.

        Args:
            works: The batches to load; read ahead of what is yielded when there are workers.
            options: `num_workers` and further arguments of torch's DataLoader.
        """
        if options["num_workers"] == 0 and not options.get("pin_memory"):
            yield from ((self._fetcher.__getitems__(work), work) for work in works)
            return
        loader, sent = self._torch_loader(options)
        sent.start(works)
        for batch in loader:
            yield batch, sent.notes.popleft()

    def _torch_loader(self, options: dict[str, Any]) -> tuple[DataLoader[Any], _Sent]:
        if self._kept is not None:
            return self._kept, self._sent
        sent = _Sent()
        loader: DataLoader[Any] = DataLoader(
            self._fetcher, batch_sampler=sent, collate_fn=_as_it_is, **_passed_on(options)
        )
        if options["num_workers"] > 0 and options.get("persistent_workers"):
            self._kept, self._sent = loader, sent
        return loader, sent


def load_portions(portions: PortionDataset, options: dict[str, Any]) -> Iterator[Portion]:
    """Return an iterator over a stream's portions, read by worker processes if `options` has any."""
    if options["num_workers"] == 0 and not options.get("pin_memory"):
        return iter(portions)
    return iter(DataLoader(portions, batch_size=None, collate_fn=_as_it_is, **_passed_on(options)))


class _Sent(Sampler[Any]):
    """A batch sampler that hands out works and notes them, so that each batch finds its own again."""

    def __init__(self) -> None:
        self.start(iter(()))

    def start(self, works: Iterator[Work]) -> None:
        self.works: Iterator[Work] = works
        self.notes: deque[Work] = deque()

    def __iter__(self) -> Iterator[Any]:
        for work in self.works:
            self.notes.append(work)
            yield work


def _as_it_is(batch: Any) -> Any:
    return batch


def _passed_on(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options torch accepts together: some are refused without workers."""
    if options["num_workers"] > 0:
        return {**options, "worker_init_fn": WorkerStart(options.get("worker_init_fn"))}
    without = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")
    return {name: value for name, value in options.items() if name not in without}
