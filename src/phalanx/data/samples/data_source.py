"""`DataSource`: what a user passes to a loader (Dataset, DataLoader, tensors, generator), normalised."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from phalanx.data.sampling.order import generators_of
from phalanx.data.sampling.shards import read_count
from phalanx.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class DataSource:
    """A dataset and the settings for loading it; None where unset."""

    dataset: Any
    batch_size: int | None = None
    """Samples per rank, as set by a DataLoader or a pipeline."""

    global_batch: int | None = None
    """Samples over all ranks, as set by a pipeline."""

    shuffle: bool | None = None
    seed: int | None = None
    generators: list[torch.Generator] = field(default_factory=list)
    """The user's generators that the order is drawn from, the deciding one first."""

    drop_last: bool | None = None
    sampler: Any = None
    batch_sampler: Any = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    num_workers: int = 0
    loading: dict[str, Any]
    """Further DataLoader arguments, passed through."""

    @property
    def is_stream(self) -> bool:
        """Whether samples can only be read sequentially."""
        return isinstance(self.dataset, IterableDataset)


class FunctionStream(IterableDataset[Any]):
    """A stream read from a function that starts a new generator each time it is called."""

    def __init__(self, function: Callable[[], Iterable[Any]]) -> None:
        self.function = function

    def __iter__(self) -> Iterator[Any]:
        return iter(self.function())


def read_source(data: Any) -> DataSource:
    """Return the dataset and settings of `data`.

    Args:
        data: A map-style or iterable torch Dataset, any object with `__getitem__` and `__len__`, a
            DataLoader, a tuple of tensors or arrays with equal first dimension, or a function that returns a
            new iterator of samples each time it is called.

    Raises:
        ConfigError: If it is none of these, or cannot be sharded over ranks.
    """
    if isinstance(data, DataLoader):
        return _read_torch_loader(data)
    if isinstance(data, tuple):
        return DataSource(dataset=_as_tensors(data), loading={})
    if isinstance(data, IterableDataset):
        return DataSource(dataset=data, loading={})
    if isinstance(data, Dataset) or _is_sequence(data):
        _require_length(data)
        _check_samples(data)
        return DataSource(dataset=data, loading={})
    if inspect.isgenerator(data) or isinstance(data, Iterator):
        raise ConfigError(
            f"Asked to load from a {type(data).__name__}, which can be read only once. "
            "Give the function that makes it, without calling it, so that each epoch can start from its beginning."
        )
    if callable(data):
        return DataSource(dataset=FunctionStream(data), loading={})
    named = ", or Pipeline(tuple(data.values()), columns=tuple(data))" if isinstance(data, dict) else ""
    raise ConfigError(
        f"Asked to load from a {type(data).__name__}. Give a torch Dataset or DataLoader, a tuple of tensors, or a "
        f"function that returns an iterator of samples{named}."
    )


def decides_batches(dataset: Any) -> bool:
    """Return whether a dataset yields ready batches of this rank's samples (`batches`), not single samples."""
    return getattr(dataset, "decides_batches", False)


def _is_sequence(data: Any) -> bool:
    return hasattr(data, "__getitem__") and isinstance(data, Sized) and not isinstance(data, str | bytes | dict)


def _check_samples(data: Any) -> None:
    """Raise if a list of columns was meant: tensors of equal length and different shapes are no samples."""
    if type(data) is not list or not all(isinstance(part, torch.Tensor | np.ndarray) and part.ndim for part in data):
        return
    if len({part.shape for part in data}) > 1 and len({len(part) for part in data}) == 1:
        raise ConfigError(
            f"Asked to load from a list of {len(data)} tensors of {len(data[0])} samples and different shapes; a list "
            "holds samples. Give a tuple of columns: (images, labels)."
        )


def _as_tensors(data: tuple[Any, ...]) -> TensorDataset:
    kinds = (torch.Tensor, np.ndarray)
    wrong = [type(part).__name__ for part in data if not isinstance(part, kinds)]
    if wrong or not data:
        raise ConfigError(
            f"Asked to load from a tuple that holds {', '.join(wrong) or 'nothing'}. "
            "Give a tuple of tensors or NumPy arrays, such as (images, labels)."
        )
    tensors = [torch.from_numpy(part) if isinstance(part, np.ndarray) else part for part in data]
    lengths = [part.shape[0] if part.ndim else 0 for part in tensors]
    if len(set(lengths)) > 1:
        raise ConfigError(
            f"Asked to load from tensors with {', '.join(map(str, lengths))} samples. "
            "Give tensors with the same number of samples."
        )
    return TensorDataset(*tensors)


def _read_torch_loader(loader: DataLoader[Any]) -> DataSource:
    source = DataSource(
        dataset=loader.dataset,
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        loading={
            "pin_memory": loader.pin_memory,
            "timeout": loader.timeout,
            "worker_init_fn": loader.worker_init_fn,
            "multiprocessing_context": loader.multiprocessing_context,
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
        },
    )
    source.generators = [] if loader.generator is None else [loader.generator]
    sampler = loader.sampler
    if loader.batch_size is None and loader.batch_sampler is not None:
        if type(loader.batch_sampler) is not BatchSampler:
            source.batch_sampler, source.drop_last = _shareable(loader.batch_sampler), None
            source.generators = generators_of(loader.batch_sampler) + source.generators
            return source
        # torch's own BatchSampler: equal to a DataLoader with that batch size.
        sampler = loader.batch_sampler.sampler
        source.batch_size, source.drop_last = loader.batch_sampler.batch_size, loader.batch_sampler.drop_last
    if source.batch_size is None:
        raise ConfigError(
            "The DataLoader has batch_size=None, so its dataset makes the batches and they cannot be sharded "
            "sample by sample. Let the dataset yield samples and give the DataLoader a batch_size."
        )
    if not source.is_stream:
        _require_length(loader.dataset)
        _read_sampler(source, sampler)
    return source


def _read_sampler(source: DataSource, sampler: Any) -> None:
    source.generators = generators_of(sampler) + source.generators
    if isinstance(sampler, DistributedSampler) and type(sampler).__iter__ is DistributedSampler.__iter__:
        # Its rank and padding are replaced by ours; the user's choice of order is preserved.
        source.shuffle, source.seed = sampler.shuffle, sampler.seed
    elif type(sampler) is SequentialSampler and sampler.data_source is source.dataset:
        source.shuffle = False
    elif type(sampler) is RandomSampler and not sampler.replacement and _draws_all(sampler, source.dataset):
        source.shuffle = True
    else:
        source.sampler = _shareable(sampler)


def _draws_all(sampler: RandomSampler, dataset: Any) -> bool:
    return sampler.data_source is dataset and sampler.num_samples == len(dataset)


def _shareable(sampler: Any) -> Any:
    name = type(sampler).__name__
    if not isinstance(sampler, Sized):
        raise ConfigError(
            f"{name} has no length, so its samples cannot be sharded over the ranks. "
            "Give it a __len__ that returns the entries of an epoch."
        )
    if hasattr(sampler, "num_replicas"):
        raise ConfigError(
            f"{name} already shards its samples over ranks (it has num_replicas); sharded again most samples "
            "would never be used. Pass the sampler of one process; the sharding is done here."
        )
    return sampler


def _require_length(dataset: Any) -> None:
    try:
        samples = len(dataset)
    except (TypeError, NotImplementedError):
        raise ConfigError(
            f"{type(dataset).__name__} has no length. Give it a __len__, or make it an IterableDataset."
        ) from None
    if samples == 0:
        raise ConfigError(f"{type(dataset).__name__} is empty: it has 0 samples. Check the path it reads from.")


def batch_sizes(source: DataSource, batch_size: int | None, global_batch: int | None) -> tuple[int, int]:
    """Return (samples per rank, samples over all ranks); the unused one is 0.

    Raises:
        ConfigError: If none or both are set, or one is no integer from 1 to the number of samples.
    """
    if source.batch_sampler is not None:
        if batch_size is not None or global_batch is not None:
            raise ConfigError(
                f"The DataLoader's {type(source.batch_sampler).__name__} makes the batches, and a batch size was "
                "given too. Pass one or the other."
            )
        return 1, 0
    if batch_size is not None and global_batch is not None:
        raise ConfigError(
            f"Asked for batch_size={batch_size} per rank and global_batch={global_batch}. Give one of the two."
        )
    if batch_size is None and global_batch is None:
        batch_size, global_batch = source.batch_size, source.global_batch
    if global_batch is not None:
        samples = read_count("global_batch", global_batch)
        _check_samples_suffice(source, samples)
        return 0, samples
    if batch_size is None:
        raise ConfigError("No batch size was given. Give batch_size= (samples per rank) or global_batch= (over all).")
    return read_count("batch_size", batch_size), 0


def _check_samples_suffice(source: DataSource, global_batch: int) -> None:
    if source.is_stream:
        return
    drawn = source.dataset if source.sampler is None else source.sampler
    if len(drawn) < global_batch:
        raise ConfigError(
            f"Asked for global_batch={global_batch}, but {type(drawn).__name__} has {len(drawn)} samples, which is not "
            f"one batch. Give {f'at most {len(drawn)}, or ' if len(drawn) else ''}more data."
        )
