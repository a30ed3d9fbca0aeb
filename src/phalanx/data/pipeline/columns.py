"""Rows by columns: what a pipeline reads, maps and hands out.

A column of n rows is a tensor (n, ...) where it can be, and else a list of n values. A dataset that reads several rows
at once says so with `column_names` and `read_columns`; of any other, samples are fetched one by one and transposed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from phalanx.data.samples.collate import collate_column
from phalanx.data.sampling.order import rows_of_tensor
from phalanx.data.sampling.seeding import seeded
from phalanx.errors import ConfigError, DataError, did_you_mean

Column = Tensor | list[Any]
Columns = dict[str, Column]


@runtime_checkable
class Columnar(Protocol):
    """A dataset that reads many rows at once."""

    column_names: tuple[str, ...]

    def read_columns(self, rows: NDArray[np.int64]) -> Columns:
        """Return the columns of `rows`, shape (n,), each as the file has it (images as uint8); draws nothing."""


def names_of(dataset: Any, asked: str | Sequence[str] | None, *, is_stream: bool) -> tuple[str, ...]:
    """Return the names of a dataset's columns.

    Args:
        dataset: Whose columns; its first sample is read when nothing else tells.
        asked: What the user calls them, in the order of the sample's parts, or which keys of its samples to take.
        is_stream: Whether it can only be read row after row.

    Raises:
        ConfigError: If there are not as many, two are equal, or those of a stream were not named.
    """
    given = None if asked is None else (asked,) if isinstance(asked, str) else tuple(asked)
    own = _own_names(dataset)
    if own is None and given is None and is_stream:
        raise ConfigError(
            f"The columns of a stream are not known before it is read. Name what {type(dataset).__name__} yields, such "
            'as columns=("image", "label").'
        )
    names = given or own or _names_of_sample(dataset)
    if given is not None and (len(set(given)) < len(given) or not given or len(given) != len(own or given)):
        raise ConfigError(
            f"Asked for the columns {', '.join(given) or '(none)'} of {type(dataset).__name__}, found "
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


def read_columns(dataset: Any, names: tuple[str, ...], rows: NDArray[np.int64], seed: int) -> Columns:
    """Return the columns of `rows` of a dataset with random access.

    Args:
        dataset: What to read.
        names: What its columns are called.
        rows: Which, shape (n,).
        seed: Where the random numbers start that a dataset draws for its samples.

    Raises:
        DataError: If a sample lacks a column; names both.
    """
    if isinstance(dataset, Columnar):
        found = dataset.read_columns(rows)
        return dict(zip(names, (found[name] for name in dataset.column_names), strict=True))
    if type(dataset) is TensorDataset:
        return dict(zip(names, (rows_of_tensor(tensor, rows) for tensor in dataset.tensors), strict=True))
    fetch_many = getattr(dataset, "__getitems__", None)
    numbers = rows.tolist()
    with seeded(seed):
        samples = fetch_many(numbers) if fetch_many is not None else samples_of(dataset, numbers)
    described = type(dataset).__name__
    return transposed([values_of(s, names, n, described) for s, n in zip(samples, numbers, strict=True)], names)


def samples_of(dataset: Any, rows: Iterable[int]) -> list[Any]:
    """Return samples of a dataset, one by one; an error among them gets a note that says which row it was."""
    samples = []
    for row in rows:
        try:
            samples.append(dataset[row])
        except Exception as error:
            error.add_note(f"while reading row {row} of {type(dataset).__name__}")
            raise
    return samples


def values_of(sample: Any, names: tuple[str, ...], row: int, described: str) -> list[Any]:
    """Return a sample's values by column.

    Args:
        sample: A dictionary, which may hold more; a tuple or list; or the one value there is.
        names: The columns.
        row: Its number, for the message.
        described: Where it is from, for the message.

    Raises:
        DataError: If a column is missing; names it.
    """
    if isinstance(sample, dict):
        missing = [name for name in names if name not in sample]
        found = ", ".join(map(str, sample)) or "nothing"
        hint = did_you_mean(missing[0], map(str, sample)) if missing else ""
        values = [] if missing else [sample[name] for name in names]
    else:
        values = _parts(sample)
        missing = list(names[len(values) :])
        found, hint = f"{len(values)} value{'s' * (len(values) != 1)}", ""
    if missing or len(values) != len(names):
        lacks = f"has no {missing[0]!r}" if missing else "has more"
        raise DataError(
            f"Row {row} of {described} {lacks}: asked for {', '.join(names)}, found {found}.{hint} "
            "Let every row hold all columns, or name the columns it has."
        )
    return values


def transposed(rows: list[list[Any]], names: tuple[str, ...]) -> Columns:
    """Return rows of values by column."""
    return {name: [row[i] for row in rows] for i, name in enumerate(names)}


def batched(name: str, column: Column) -> Any:
    """Return a column as the part of a batch: a tensor, or what torch's `default_collate` makes of its values.

    Raises:
        DataError: If its values have different shapes, or are nothing that makes a batch.
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
