"""`TableUpdate`: gradients, deltas or values for rows of a table, with validation and serialisation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import ConfigError
from phalanx.ps.snapshot.records import Array
from phalanx.ps.table.arrays import Keys, Rows
from phalanx.ps.table.rules import TableSpec

KINDS = ("gradient", "delta", "assign")


COLUMNS: Mapping[str, type[np.generic]] = {"counts": np.uint32, "shows": np.float32, "clicks": np.float32}
"""What may come with gradients, one value per key, in the order it is sent."""


@dataclass(frozen=True, slots=True)
class TableUpdate:
    """Gradients, deltas or values for rows of one table."""

    table: str
    keys: Keys
    """Unique ids, shape (n,)."""

    values: Rows
    """Shape (n, dim)."""

    kind: str = "gradient"
    """`gradient` (the table's rule applies it), `delta` (added to the row), `assign` (replaces the row's values and
    keeps its optimizer state)."""

    lr: float | None = None
    """Learning rate for the rule; the specification's own when None."""

    counts: NDArray[np.uint32] | None = None
    """How often each id occurred in the batch, shape (n,); once each when None. Entry filters count these."""

    shows: NDArray[np.float32] | None = None
    clicks: NDArray[np.float32] | None = None

    def arrays(self) -> list[Array]:
        """Return the arrays in the order they are sent: keys, values, `COLUMNS`."""
        columns = [getattr(self, name) for name in COLUMNS]
        return [self.keys, self.values, *(column for column in columns if column is not None)]

    def check(self, spec: TableSpec) -> None:
        """Check that it can be applied to its table, which then does not check it again.

        Raises:
            ConfigError: If the kind, a type, a shape or the learning rate does not fit; names the table.
        """
        if self.kind not in KINDS:
            raise ConfigError(f"Asked table '{spec.name}' for a change of kind {self.kind!r}; kinds: {KINDS}.")
        check_keys(spec, self.keys)
        n, values = len(self.keys), self.values
        if not values.flags.c_contiguous:
            raise ConfigError(f"Gave table '{spec.name}' rows with gaps in memory. Give C-contiguous arrays.")
        if values.dtype != np.float32 or values.shape != (n, spec.dim):
            raise ConfigError(
                f"Gave table '{spec.name}' {self.kind} rows of type {values.dtype} and shape {values.shape} for {n} "
                f"keys; it holds rows of {spec.dim} values. Give float32 of shape ({n}, {spec.dim})."
            )
        for name, dtype in COLUMNS.items():
            column = getattr(self, name)
            if column is not None and (column.shape != (n,) or column.dtype != dtype):
                raise ConfigError(
                    f"Gave table '{spec.name}' {name} of type {column.dtype} and shape {column.shape} for {n} keys. "
                    f"Give {np.dtype(dtype)} of shape ({n},), or none."
                )
        _check_lr(spec, self.lr)


def check_tables_once(updates: Sequence[TableUpdate]) -> None:
    """Check that a push has one change of each table: a store applies all of a push, or nothing.

    Raises:
        ConfigError: If a table is named twice; names it.
    """
    names: set[str] = set()
    for update in updates:
        if update.table in names:
            raise ConfigError(
                f"A push has two changes of table '{update.table}'. Give it one, with each id once, or push twice."
            )
        names.add(update.table)


def check_keys(spec: TableSpec, keys: Keys) -> None:
    """Check that these can be ids of a table.

    Raises:
        ConfigError: If their type or shape does not fit; names the table.
    """
    if keys.dtype != np.int64 or keys.ndim != 1:
        raise ConfigError(
            f"Asked table '{spec.name}' for keys of type {keys.dtype} and shape {keys.shape}. "
            "Give int64 keys in one dimension."
        )
    if not keys.flags.c_contiguous:
        raise ConfigError(f"Asked table '{spec.name}' for keys with gaps in memory. Give C-contiguous arrays.")


def _check_lr(spec: TableSpec, lr: float | None) -> None:
    if lr is not None and not (0 <= lr < float("inf")):
        raise ConfigError(f"Asked table '{spec.name}' to learn at rate {lr}. Give a number of at least 0.")
    if lr == 0 and spec.rule.divides_by_lr:
        raise ConfigError(
            f"Asked table '{spec.name}' to learn at rate 0, by which {type(spec.rule).__name__} divides. Give "
            "more than 0."
        )


def unpack_updates(described: Sequence[Mapping[str, Any]], arrays: Sequence[Array]) -> list[TableUpdate]:
    """Return the updates of a push in the log.

    Args:
        described: Of each `table`, `kind`, `lr`, and true for each of its `COLUMNS`.
        arrays: What `TableUpdate.arrays` returns of each, one after the other.

    Raises:
        ConfigError: If there are too few or too many arrays.
    """
    rest = iter(arrays)
    try:
        updates = [_unpack_update(update, rest) for update in described]
    except StopIteration:
        raise ConfigError(f"A push of {len(described)} changes came with only {len(arrays)} arrays.") from None
    if next(rest, None) is not None:
        raise ConfigError(f"A push of {len(described)} changes came with {len(arrays)} arrays, which are too many.")
    return updates


def _unpack_update(update: Mapping[str, Any], rest: Iterator[Array]) -> TableUpdate:
    keys, values = next(rest), next(rest)
    columns: dict[str, Any] = {column: next(rest) for column in COLUMNS if update.get(column)}
    return TableUpdate(
        update["table"], keys, values, kind=update.get("kind", "gradient"), lr=update.get("lr"), **columns
    )
