"""What a user hands a loader, read into one value: a Dataset, a DataLoader, tensors, a generator function."""

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
from phalanx.data.sampling.shards import asked_rows
from phalanx.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class Source:
    """A dataset and everything that was said about loading it; None where nothing was said."""

    dataset: Any
    batch_size: int | None = None
    """Rows per rank, as a DataLoader's or a pipeline's user cut them."""

    global_batch: int | None = None
    """Rows over all ranks, as a pipeline's user cut them."""

    shuffle: bool | None = None
    seed: int | None = None
    generators: list[torch.Generator] = field(default_factory=list)
    """The user's generators that the order is drawn from, the one that decides first."""

    drop_last: bool | None = None
    sampler: Any = None
    batch_sampler: Any = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    num_workers: int = 0
    loading: dict[str, Any]
    """Further DataLoader arguments that are passed on as they are."""

    @property
    def is_stream(self) -> bool:
        """Whether rows only come one after the other."""
        return isinstance(self.dataset, IterableDataset)


class FunctionStream(IterableDataset[Any]):
    """A stream read from a function that starts a new generator each time it is called."""

    def __init__(self, function: Callable[[], Iterable[Any]]) -> None:
        self.function = function

    def __iter__(self) -> Iterator[Any]:
        return iter(self.function())


def read_source(data: Any) -> Source:
    """Return what `data` is and says.

    Args:
        data: A map-style or iterable torch Dataset, any object with `__getitem__` and `__len__`, a
            DataLoader, a tuple of tensors or arrays with equal first dimension, or a function that returns a
            new iterator of samples each time it is called.

    Raises:
        ConfigError: If it is none of these, or cannot be shared out over ranks.
    """
    if isinstance(data, DataLoader):
        return _read_torch_loader(data)
    if isinstance(data, tuple):
        return Source(dataset=_as_tensors(data), loading={})
    if isinstance(data, IterableDataset):
        return Source(dataset=data, loading={})
    if isinstance(data, Dataset) or _is_sequence(data):
        _require_length(data)
        _check_samples(data)
        return Source(dataset=data, loading={})
    if inspect.isgenerator(data) or isinstance(data, Iterator):
        raise ConfigError(
            f"Asked to load from a {type(data).__name__}, which can be read only once. "
            "Give the function that makes it, without calling it, so that each epoch starts anew."
        )
    if callable(data):
        return Source(dataset=FunctionStream(data), loading={})
    named = ", or Pipeline(tuple(data.values()), columns=tuple(data))" if isinstance(data, dict) else ""
    raise ConfigError(
        f"Asked to load from a {type(data).__name__}. Give a torch Dataset or DataLoader, a tuple of tensors, or a "
        f"function that returns an iterator of samples{named}."
    )


def decides_batches(dataset: Any) -> bool:
    """Return whether a dataset hands out ready batches of this rank's own rows (`batches`), not one row at a time."""
    return getattr(dataset, "decides_batches", False)


def _is_sequence(data: Any) -> bool:
    return hasattr(data, "__getitem__") and isinstance(data, Sized) and not isinstance(data, str | bytes | dict)


def _check_samples(data: Any) -> None:
    """Raise where a list of columns was meant: tensors of as many rows and different shapes are no samples."""
    if type(data) is not list or not all(isinstance(part, torch.Tensor | np.ndarray) and part.ndim for part in data):
        return
    if len({part.shape for part in data}) > 1 and len({len(part) for part in data}) == 1:
        raise ConfigError(
            f"Asked to load from a list of {len(data)} tensors of {len(data[0])} rows and different shapes; a list "
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
            f"Asked to load from tensors with {', '.join(map(str, lengths))} rows. "
            "Give tensors with the same number of rows."
        )
    return TensorDataset(*tensors)


def _read_torch_loader(loader: DataLoader[Any]) -> Source:
    source = Source(
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
        # Torch's own, which cuts as a DataLoader does that was given the batch size.
        sampler = loader.batch_sampler.sampler
        source.batch_size, source.drop_last = loader.batch_sampler.batch_size, loader.batch_sampler.drop_last
    if source.batch_size is None:
        raise ConfigError(
            "The DataLoader has batch_size=None, so its dataset cuts the batches and they cannot be shared "
            "out "
            "row by row. Let the dataset yield samples and give the DataLoader a batch_size."
        )
    if not source.is_stream:
        _require_length(loader.dataset)
        _read_sampler(source, sampler)
    return source


def _read_sampler(source: Source, sampler: Any) -> None:
    source.generators = generators_of(sampler) + source.generators
    if isinstance(sampler, DistributedSampler) and type(sampler).__iter__ is DistributedSampler.__iter__:
        # Its rank and padding are replaced by ours; what the user chose about the order is kept.
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
            f"{name} has no length, so its rows cannot be shared out over the ranks. "
            "Give it a __len__ that says how many entries an epoch has."
        )
    if hasattr(sampler, "num_replicas"):
        raise ConfigError(
            f"{name} already shares its rows over ranks (it has num_replicas); shared out again most rows "
            "would "
            "never be used. Give the sampler of one process; the sharing is done here."
        )
    return sampler


def _require_length(dataset: Any) -> None:
    try:
        rows = len(dataset)
    except (TypeError, NotImplementedError):
        raise ConfigError(
            f"{type(dataset).__name__} has no length. Give it a __len__, or make it an IterableDataset."
        ) from None
    if rows == 0:
        raise ConfigError(f"{type(dataset).__name__} is empty: it has 0 rows. Check the path it reads from.")


def batch_sizes(source: Source, batch_size: int | None, global_batch: int | None) -> tuple[int, int]:
    """Return (rows per rank, rows over all ranks), the one that was not chosen as 0.

    Raises:
        ConfigError: If none or both were given, or one that is no whole number from 1 to the rows there are.
    """
    if source.batch_sampler is not None:
        if batch_size is not None or global_batch is not None:
            raise ConfigError(
                f"The DataLoader's {type(source.batch_sampler).__name__} cuts the batches, and a batch size was "
                "given too. Give one or the other."
            )
        return 1, 0
    if batch_size is not None and global_batch is not None:
        raise ConfigError(
            f"Asked for batch_size={batch_size} per rank and global_batch={global_batch}. Give one of the two."
        )
    if batch_size is None and global_batch is None:
        batch_size, global_batch = source.batch_size, source.global_batch
    if global_batch is not None:
        rows = asked_rows("global_batch", global_batch)
        _check_rows_suffice(source, rows)
        return 0, rows
    if batch_size is None:
        raise ConfigError("No batch size was given. Give batch_size= (rows per rank) or global_batch= (over all).")
    return asked_rows("batch_size", batch_size), 0


def _check_rows_suffice(source: Source, global_batch: int) -> None:
    if source.is_stream:
        return
    drawn = source.dataset if source.sampler is None else source.sampler
    if len(drawn) < global_batch:
        raise ConfigError(
            f"Asked for global_batch={global_batch}, but {type(drawn).__name__} has {len(drawn)} rows, which is not "
            f"one batch. Give {f'at most {len(drawn)}, or ' if len(drawn) else ''}more data."
        )
