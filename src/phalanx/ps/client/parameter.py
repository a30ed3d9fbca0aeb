"""`TableParameter`: the `nn.Parameter` that stands for an embedding table in a model.

It holds no rows: its shape is (0, dim). After backward its `.grad` is the gradient of the rows that were looked up
since the last step, shape (unique ids, dim), and its data zeros of that shape without memory, so that gradient scaling,
clipping and the user's own code see what they would see of any parameter. The optimizer step takes the gradient away
and pushes it.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Container
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from phalanx.errors import ConfigError
from phalanx.ps.stores.base import Keys
from phalanx.ps.stores.dedup import unique
from phalanx.ps.stores.update import TableUpdate
from phalanx.ps.table.rules import EntryPolicy, FileDtype, Init, TableSpec
from phalanx.ps.table.update_rules import Rule

Counts = NDArray[np.uint32]
Clicks = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class TableSettings:
    """The settings of a module's table; the rule may follow the optimizer that holds the parameter."""

    dim: int
    optimizer: Rule | None
    entry: EntryPolicy | None
    init: Init
    dtype: Literal["float32", "bfloat16"]
    seed: int
    max_bytes: int | None
    padding_idx: int | None
    unseen_days: int | None = None
    evict: Literal["spill", "drop"] = "spill"
    file_dtype: FileDtype = "float32"

    def spec(self, name: str, rule: Rule) -> TableSpec:
        """Return the specification of a table of this name and rule."""
        return TableSpec(
            name=name,
            dim=self.dim,
            rule=rule,
            init=self.init,
            entry=self.entry,
            dtype=self.dtype,
            seed=self.seed,
            max_bytes=self.max_bytes,
            evict=self.evict,
            file_dtype=self.file_dtype,
            unseen_days=self.unseen_days,
        )


@dataclass(slots=True)
class UniqueKeys:
    """Which ids one lookup read, and how often; all of shape (n,)."""

    keys: Keys
    """Unique ids."""

    counts: Counts
    clicks: Clicks | None = None
    """Clicks per id; none when None."""


class TableParameter(nn.Parameter):
    """Stands for one table; modules that name the same table share it.

    Args:
        settings: What the table is.
    """

    is_table = True
    """Tells it from plain parameters where this module is not imported."""

    settings: TableSettings
    table: str | None
    """Name of the table; None until it is given, or follows from the module's place in the model."""

    first_values: Tensor | None
    """Rows of the ids 0, 1, ... before training, shape (n, dim), until the table is made; None for those of `init`."""

    _seen: UniqueKeys | None

    def __new__(cls, settings: TableSettings) -> TableParameter:
        """Make the parameter of a table without a name."""
        self = super().__new__(cls, torch.empty(0, settings.dim))
        self.become(settings)
        return self

    def become(self, settings: TableSettings) -> None:
        """Stand for a table that has no name yet."""
        self.settings, self.table, self._seen = settings, None, None
        self.first_values = None

    def __deepcopy__(self, memo: object) -> TableParameter:
        return self  # rows are not copied: a copy of a model reads and trains the same table

    @property
    def label(self) -> str:
        """The table's name for messages."""
        return repr(self.table) if self.table else "without a name"

    def collect(self, seen: UniqueKeys, gradient: Tensor) -> None:
        """Add the gradient of the rows of one lookup to `.grad`.

        Args:
            seen: The ids.
            gradient: Shape (n, dim), dtype and device of the parameter.
        """
        # zero_grad(set_to_none=False) leaves zeros: gradients dropped all the same.
        if self._seen is not None and self.grad is not None and self.grad.any():
            seen, gradient = _merge_gradients((self._seen, self.grad), (seen, gradient))
        self._seen, self.grad = seen, None
        self.data = gradient.new_zeros(()).expand_as(gradient)
        self.grad = gradient

    def take_update(self, lr: float | None) -> TableUpdate | None:
        """Return what `.grad` holds as a change of the table and empty the parameter; None when there is nothing."""
        seen, gradient = self._seen, self.grad
        self._seen = self.grad = None
        if self.shape[0]:
            self.data = self.data.new_empty(0, self.settings.dim)
        if seen is None or gradient is None:
            return None
        assert self.table is not None
        values = gradient.detach().to("cpu", torch.float32).contiguous().numpy()
        return TableUpdate(self.table, seen.keys, values, lr=lr, counts=seen.counts, clicks=seen.clicks)


def _merge_gradients(first: tuple[UniqueKeys, Tensor], second: tuple[UniqueKeys, Tensor]) -> tuple[UniqueKeys, Tensor]:
    seen, gradient = (first[0], second[0]), torch.cat([first[1], second[1]])
    keys, inverse, _ = unique([s.keys for s in seen])
    where = torch.from_numpy(inverse).to(gradient.device)
    total = gradient.new_zeros(len(keys), gradient.shape[1]).index_add_(0, where, gradient)
    counts = _sum_by_key([s.counts for s in seen], inverse, len(keys)).astype(np.uint32)
    clicks = None
    if any(s.clicks is not None for s in seen):
        each = [np.zeros(len(s.keys), np.float32) if s.clicks is None else s.clicks for s in seen]
        clicks = _sum_by_key(each, inverse, len(keys)).astype(np.float32)
    return UniqueKeys(keys, counts, clicks), total


def _sum_by_key(values: list[Counts] | list[Clicks], inverse: Keys, size: int) -> NDArray[Any]:
    return np.bincount(inverse, weights=np.concatenate(values), minlength=size)


# --- names ----------------------------------------------------------------------------------------------------------

_named: weakref.WeakValueDictionary[str, TableParameter] = weakref.WeakValueDictionary()


def shared_parameter(name: str | None, settings: TableSettings) -> TableParameter:
    """Return the parameter of the table of this name, made now if there is none; without a name always a new one.

    Raises:
        ConfigError: If the table exists with other settings; names the first that differs.
    """
    if name and _settings(name) not in (None, settings):
        gc.collect()  # a model that was deleted may live on in a cycle of references, and its names with it
    parameter = _named.get(name) if name else None
    if parameter is None:
        parameter = TableParameter(settings)
        if name:
            give_name(parameter, name)
        return parameter
    for field in fields(settings):
        actual, expected = getattr(parameter.settings, field.name), getattr(settings, field.name)
        if actual != expected:
            raise ConfigError(
                f"a module of name={name!r} was made with {field.name}={actual!r} and is now asked with "
                f"{field.name}={expected!r}. Tables of one name are one table: use the same settings, or another name."
            )
    return parameter


def _settings(name: str) -> TableSettings | None:
    parameter = _named.get(name)
    return parameter.settings if parameter is not None else None


def is_named(name: str | None) -> bool:
    """Return whether this process has a table of this name."""
    return name in _named


def give_name(parameter: TableParameter, name: str) -> None:
    """Name the table of a parameter.

    Raises:
        ConfigError: If another table has this name.
    """
    if _named.get(name, parameter) is not parameter:
        raise ConfigError(
            f"there is a table {name!r} in this process already, of another model. Give one of them another name: "
            "SparseEmbedding(..., name=...)."
        )
    parameter.table = name
    _named[name] = parameter


def free_name(taken: Container[str]) -> str:
    """Return the first of `embedding`, `embedding_1`, ... that no table has, nor had: those in `taken`."""
    number = 0
    while (name := f"embedding_{number}" if number else "embedding") in _named or name in taken:
        number += 1
    return name
