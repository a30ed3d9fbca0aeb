"""`Map`: one `dataset.map(...)` step, applied per sample or per batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.data.pipeline.columns import Columns
from phalanx.data.sampling.hash64 import GOLDEN, WORD, mix64
from phalanx.data.sampling.row_rng import Draws
from phalanx.data.sampling.seeding import seeded
from phalanx.data.vision.compose import Chain
from phalanx.data.vision.transform import Transform
from phalanx.errors import ConfigError, DataError, did_you_mean

Seeds = NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True)
class Map:
    """Operations on columns. With several input columns each operation takes all values and returns the new ones."""

    operations: tuple[Callable[..., Any], ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    number: int
    """Index of the step in the chain; steps draw different random numbers."""

    per_batch: bool = False
    """Whether it is applied to this rank's part of a batch rather than to samples."""

    def names(self, before: tuple[str, ...]) -> tuple[str, ...]:
        """Return the columns afterwards: the outputs take the position of the first input."""
        at = before.index(self.inputs[0])
        others = [name for name in before if name not in self.inputs]
        position = sum(1 for name in before[:at] if name not in self.inputs)
        return (*others[:position], *self.outputs, *others[position:])

    def apply(self, columns: Columns, seeds: Seeds) -> Columns:
        """Return the columns after the operations.

        Args:
            columns: Of n samples, or parts of a batch of n samples.
            seeds: Seed of each sample, shape (n,).
        """
        draws = Draws(mix64(seeds + np.uint64(GOLDEN * (self.number + 1) & WORD)))
        work = self._on_batch if self.per_batch else self._on_samples
        values = dict(zip(self.outputs, work(columns, draws), strict=True))
        return {name: values[name] if name in values else columns[name] for name in self.names(tuple(columns))}

    def _on_samples(self, columns: Columns, draws: Draws) -> list[Any]:
        if self._is_of_one:
            return [self._by_sample.batched(columns[self.inputs[0]], draws)]
        samples: list[Any] = list(zip(*(columns[name] for name in self.inputs), strict=True))
        results = self._by_sample.batched(samples, draws)
        return [list(column) for column in zip(*(self._check_results(row) for row in results), strict=True)]

    @property
    def _is_of_one(self) -> bool:
        return len(self.inputs) == 1 == len(self.outputs)

    @cached_property
    def _by_sample(self) -> Chain:
        return Chain(self.operations if self._is_of_one else [_StarCall(operation) for operation in self.operations])

    def _on_batch(self, columns: Columns, draws: Draws) -> list[Any]:
        values = tuple(columns[name] for name in self.inputs)
        for operation in self.operations:
            if isinstance(operation, Transform):
                values = (operation.batched(torch.as_tensor(values[0]), draws),)
                continue
            with seeded(int(draws.words()[0])):
                values = _as_tuple(operation(*values))
        for value in self._check_results(values):
            if isinstance(value, Tensor | list) and len(value) != len(draws):
                raise DataError(
                    f"{self._description()} made {len(value)} samples of a batch of {len(draws)}. A map must keep the "
                    "number of samples; filter them in the dataset."
                )
        return list(values)

    def _check_results(self, values: Any) -> tuple[Any, ...]:
        results = _as_tuple(values)
        if len(results) != len(self.outputs):
            raise DataError(
                f"{self._description()} returned {len(results)} values for the {len(self.outputs)} columns "
                f"{', '.join(self.outputs)}. Return one for each, or name them with output_columns."
            )
        return results

    def _description(self) -> str:
        last = self.operations[-1]
        return f"map of {getattr(last, '__name__', last)!s} on {', '.join(self.inputs)}"


def build_map(
    operations: Callable[..., Any] | Sequence[Callable[..., Any]],
    input_columns: str | Sequence[str] | None,
    output_columns: str | Sequence[str] | None,
    columns: tuple[str, ...],
    *,
    number: int,
    per_batch: bool,
) -> Map:
    """Return a `Map` after checking its arguments.

    Args:
        operations: One or several; see `Map`.
        input_columns: The first column when omitted.
        output_columns: As the inputs when omitted.
        columns: The columns before it.
        number: See `Map`.
        per_batch: See `Map`.

    Raises:
        ConfigError: If an operation cannot be called, a column is not there, or an output already is.
    """
    if isinstance(operations, str):
        raise ConfigError(
            f"Asked to map through {operations!r}, which is text. Operations come first, columns after them: "
            f"map(operations, {operations!r})."
        )
    inputs = columns[:1] if input_columns is None else _as_names(input_columns)
    outputs = inputs if output_columns is None else _as_names(output_columns)
    for name in inputs:
        if name not in columns:
            raise ConfigError(
                f"Asked to map the column {name!r}, but the columns are {', '.join(columns)}."
                f"{did_you_mean(name, columns)} Give input_columns= one or more of them."
            )
    others = [name for name in columns if name not in inputs]
    if (
        not inputs
        or not outputs
        or len(set(inputs)) < len(inputs)
        or len({*others, *outputs}) < len(others) + len(outputs)
    ):
        raise ConfigError(
            f"Asked to map {', '.join(inputs) or 'nothing'} to {', '.join(outputs) or 'nothing'} beside "
            f"{', '.join(others) or 'no other column'}. Give every column a name of its own."
        )
    chain = tuple(operations) if isinstance(operations, Sequence) else (operations,)
    if not chain:
        raise ConfigError(f"Asked to map {', '.join(inputs)} through no operation. Give one, or leave the map out.")
    Chain(chain)  # raises if an operation is invalid
    if len(inputs) > 1 and (transforms := [op for op in chain if isinstance(op, Transform)]):
        raise ConfigError(
            f"Asked to map {', '.join(inputs)} through {transforms[0]!r}, which takes one column. "
            "Map one column at a time, or write a function of all of them."
        )
    return Map(operations=chain, inputs=inputs, outputs=outputs, number=number, per_batch=per_batch)


class _StarCall:
    """Calls an operation with the values of a sample as separate arguments."""

    def __init__(self, operation: Callable[..., Any]) -> None:
        self.operation = operation

    def __call__(self, values: Any) -> Any:
        return self.operation(*_as_tuple(values))


def _as_tuple(values: Any) -> tuple[Any, ...]:
    return values if isinstance(values, tuple) else (values,)


def _as_names(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)
