"""`read_columns`: columnar samples: column names of a dataset, reading columns, collating them.

A column of n samples is a tensor (n, ...) if possible, else a list of n values. A dataset that reads many samples at
once has `column_names` and `read_columns`; from any other, samples are fetched one by one and transposed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from phalanx.data.samples.batch import collate_column
from phalanx.data.sampling.order import rows_of_tensor
from phalanx.data.sampling.seeding import seeded
from phalanx.errors import ConfigError, DataError, did_you_mean

Column = Tensor | list[Any]
Columns = dict[str, Column]


@runtime_checkable
class Columnar(Protocol):
    """A dataset that reads many samples at once."""

    column_names: tuple[str, ...]

    def read_columns(self, indices: NDArray[np.int64]) -> Columns:
        """Return the columns of samples, `indices` (n,), each as stored in the file; no random numbers are drawn."""


def names_of(dataset: Any, columns: str | Sequence[str] | None, *, is_stream: bool) -> tuple[str, ...]:
    """Return the names of a dataset's columns.

    Args:
        dataset: The dataset; its first sample is read if nothing else tells the columns.
        columns: The user's names, in the order of the sample's parts, or the keys to take of its samples.
        is_stream: Whether it can only be read sample after sample.

    Raises:
        ConfigError: If their number differs, two are equal, or those of a stream are not named.
    """
    chosen = None if columns is None else (columns,) if isinstance(columns, str) else tuple(columns)
    own = _own_names(dataset)
    if own is None and chosen is None and is_stream:
        raise ConfigError(
            f"The columns of a stream are not known before it is read. Name what {type(dataset).__name__} yields, such "
            'as columns=("image", "label").'
        )
    names = chosen or own or _names_of_sample(dataset)
    if chosen is not None and (len(set(chosen)) < len(chosen) or not chosen or len(chosen) != len(own or chosen)):
        raise ConfigError(
            f"Asked for the columns {', '.join(chosen) or '(none)'} of {type(dataset).__name__}, found "
            f"{', '.join(own) if own else 'no other'}. Give each column one name of its own."
        )
    return names


def _own_names(dataset: Any) -> tuple[str, ...] | None:
    if type(dataset) is TensorDataset:
        return _numbered(len(dataset.tensors))
    return tuple(dataset.column_names) if hasattr(dataset, "column_names") else None


def _names_of_sample(dataset: Any) -> tuple[str, ...]:
    with seeded(0):
        sample = dataset[0]
    return tuple(map(str, sample)) if isinstance(sample, dict) else _numbered(len(_parts(sample)))


def read_columns(dataset: Any, names: tuple[str, ...], indices: NDArray[np.int64], seed: int) -> Columns:
    """Return the columns of the samples at `indices` of a dataset with random access.

    Args:
        dataset: What to read.
        names: Names of its columns.
        indices: Indices of the samples, shape (n,).
        seed: Seed of the random numbers that the dataset draws.

    Raises:
        DataError: If a sample lacks a column; names both.
    """
    if isinstance(dataset, Columnar):
        columns = dataset.read_columns(indices)
        return dict(zip(names, (columns[name] for name in dataset.column_names), strict=True))
    if type(dataset) is TensorDataset:
        return dict(zip(names, (rows_of_tensor(tensor, indices) for tensor in dataset.tensors), strict=True))
    fetch_many = getattr(dataset, "__getitems__", None)
    numbers = indices.tolist()
    with seeded(seed):
        samples = fetch_many(numbers) if fetch_many is not None else samples_of(dataset, numbers)
    source = type(dataset).__name__
    return transpose([values_of(s, names, n, source) for s, n in zip(samples, numbers, strict=True)], names)


def samples_of(dataset: Any, indices: Iterable[int]) -> list[Any]:
    """Return samples of a dataset, one by one; errors get a note that names the sample."""
    samples = []
    for index in indices:
        try:
            samples.append(dataset[index])
        except Exception as error:
            error.add_note(f"while reading sample {index} of {type(dataset).__name__}")
            raise
    return samples


def values_of(sample: Any, names: tuple[str, ...], index: int, source: str) -> list[Any]:
    """Return a sample's values by column.

    Args:
        sample: A dictionary, which may hold more; a tuple or list; or the one value there is.
        names: The columns.
        index: Its index, for the message.
        source: Where it is from, for the message.

    Raises:
        DataError: If a column is missing; names it.
    """
    if isinstance(sample, dict):
        missing = [name for name in names if name not in sample]
        present = ", ".join(map(str, sample)) or "nothing"
        hint = did_you_mean(missing[0], map(str, sample)) if missing else ""
        values = [] if missing else [sample[name] for name in names]
    else:
        values = _parts(sample)
        missing = list(names[len(values) :])
        present, hint = f"{len(values)} value{'s' * (len(values) != 1)}", ""
    if missing or len(values) != len(names):
        lacks = f"has no {missing[0]!r}" if missing else "has more"
        raise DataError(
            f"Sample {index} of {source} {lacks}: asked for {', '.join(names)}, found {present}.{hint} "
            "Let every sample hold all columns, or name the columns it has."
        )
    return values


def transpose(samples: list[list[Any]], names: tuple[str, ...]) -> Columns:
    """Return samples, each a list of values, as columns."""
    return {name: [sample[i] for sample in samples] for i, name in enumerate(names)}


def collate_named(name: str, column: Column) -> Any:
    """Return a column as part of a batch: a tensor, or torch's `default_collate` of its values.

    Raises:
        DataError: If its values have different shapes, or cannot be batched.
    """
    if isinstance(column, Tensor):
        return column
    shapes = {tuple(value.shape) for value in column if isinstance(value, Tensor | np.ndarray)}
    if len(shapes) > 1:
        a, b = sorted(shapes, key=str)[:2]
        raise DataError(
            f"The column {name!r} of a batch holds values of shapes {a} and {b}, which do not stack. "
            "Bring them to one shape with map before batch, such as vision.Resize or padding."
        )
    try:
        return collate_column(tuple(column))
    except TypeError:
        kinds = sorted({type(value).__name__ for value in column})
        raise DataError(
            f"The column {name!r} of a batch holds values of type {', '.join(kinds)}, which make no batch. Let the "
            "data and its maps give tensors, arrays, numbers or text."
        ) from None


def _parts(sample: Any) -> list[Any]:
    return list(sample) if isinstance(sample, tuple | list) else [sample]


def _numbered(count: int) -> tuple[str, ...]:
    return tuple(f"column{i}" for i in range(count))
