"""`SampleFetcher`: load the samples of requested batches, in this process or in torch DataLoader workers."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset, default_collate

from phalanx.comm.local.tensor_sharing import share_by_memfd
from phalanx.data.pipeline.columns import samples_of
from phalanx.data.pipeline.pipeline import Pipeline
from phalanx.data.samples.batch import collate
from phalanx.data.sampling.order import BatchRequest, rows_of_tensor
from phalanx.data.sampling.seeding import seeded
from phalanx.data.stream.stream_batches import StreamBatch, StreamBatches


class SampleFetcher(Dataset[Any]):
    """Turns a `BatchRequest` into a collated batch; workers get a copy of the fetcher."""

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None) -> None:
        self.dataset = dataset
        self.collate_fn = collate if collate_fn in (None, default_collate) else collate_fn
        # Indexing the tensors once equals fetching samples and stacking them.
        self.is_tensors = type(dataset) is TensorDataset and self.collate_fn is collate

    def __getitems__(self, request: BatchRequest) -> Any:
        """Return the batch; torch's fetcher calls this with whatever the batch sampler yielded."""
        if self.is_tensors:
            return [rows_of_tensor(tensor, request.indices) for tensor in self.dataset.tensors]
        with seeded(request.seed):
            return self.collate_fn(self._samples(request))

    def _samples(self, request: BatchRequest) -> list[Any]:
        fetch_many = getattr(self.dataset, "__getitems__", None)
        if fetch_many is not None:
            samples: list[Any] = fetch_many(list(request.indices))
            return samples
        return samples_of(self.dataset, request.indices)


class PipelineFetcher(Dataset[Any]):
    """Turns a `BatchRequest` of a pipeline into its batch."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline

    def __getitems__(self, request: BatchRequest) -> Any:
        """See `SampleFetcher`."""
        return self.pipeline.fetch(request)


class RequestLoader:
    """Loads requested batches in order, in this process or in workers; persistent workers serve every epoch."""

    def __init__(self, fetcher: SampleFetcher | PipelineFetcher) -> None:
        self._fetcher = fetcher
        self._sampler = _RequestSampler()
        self._loader: DataLoader[Any] | None = None

    def load(self, requests: Iterator[BatchRequest], options: dict[str, Any]) -> Iterator[tuple[Any, BatchRequest]]:
        """Yield (batch, request) for each request, in order.

        Args:
            requests: The batches to load; read ahead of what is yielded when there are workers.
            options: `num_workers` and further arguments of torch's DataLoader.
        """
        if options["num_workers"] == 0 and not options.get("pin_memory"):
            yield from ((self._fetcher.__getitems__(request), request) for request in requests)
            return
        loader, sampler = self._torch_loader(options)
        sampler.start(requests)
        for batch in loader:
            yield batch, sampler.notes.popleft()

    def _torch_loader(self, options: dict[str, Any]) -> tuple[DataLoader[Any], _RequestSampler]:
        if self._loader is not None:
            return self._loader, self._sampler
        sampler = _RequestSampler()
        loader: DataLoader[Any] = DataLoader(
            self._fetcher, batch_sampler=sampler, collate_fn=_as_it_is, **_dataloader_options(options)
        )
        if options["num_workers"] > 0 and options.get("persistent_workers"):
            self._loader, self._sampler = loader, sampler
        return loader, sampler


def load_stream(portions: StreamBatches, options: dict[str, Any]) -> Iterator[StreamBatch]:
    """Return an iterator over a stream's batches, read by worker processes if `options` has any."""
    if options["num_workers"] == 0 and not options.get("pin_memory"):
        return iter(portions)
    return iter(DataLoader(portions, batch_size=None, collate_fn=_as_it_is, **_dataloader_options(options)))


class _RequestSampler(Sampler[Any]):
    """A batch sampler that yields requests and records them, to match each batch with its request."""

    def __init__(self) -> None:
        self.start(iter(()))

    def start(self, requests: Iterator[BatchRequest]) -> None:
        self.requests: Iterator[BatchRequest] = requests
        self.notes: deque[BatchRequest] = deque()

    def __iter__(self) -> Iterator[Any]:
        for request in self.requests:
            self.notes.append(request)
            yield request


def _as_it_is(batch: Any) -> Any:
    return batch


def _dataloader_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that torch accepts together: it rejects some without workers."""
    if options["num_workers"] > 0:
        return {**options, "worker_init_fn": WorkerStart(options.get("worker_init_fn"))}
    without = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")
    return {name: value for name, value in options.items() if name not in without}


class WorkerStart:
    """Ties a worker's life to the training process, then calls the user's `worker_init_fn`.

    torch's workers check their parent only between two batches: one whose generator blocks would never end. And their
    parent may be a fork server, which outlives the training.

    Args:
        then: The user's function of the worker's number, if any.
    """

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self.then = then
        self.training = os.getpid()
        # The kernel sends the signal when the *thread* that forked ends, so it is set only for the main thread.
        self.is_by_main_thread = threading.current_thread() is threading.main_thread()

    def __call__(self, worker: int) -> None:
        """Start worker number `worker` of this process."""
        if self.is_by_main_thread and os.getppid() == self.training:
            _prctl_pr_set_pdeathsig(signal.SIGKILL)
            if os.getppid() != self.training:
                os.kill(os.getpid(), signal.SIGKILL)
        else:
            _end_with(self.training)
        share_by_memfd()
        if self.then is not None:
            self.then(worker)


def _end_with(pid: int) -> None:
    """Kill this process when another one has ended, or if it has ended already."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    except OSError:  # a kernel older than 5.3: torch looks at the parent between two batches
        return

    def wait() -> None:
        select.select([process], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="end with the training", daemon=True).start()
