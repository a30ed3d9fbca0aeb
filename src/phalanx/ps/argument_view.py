"""`ArgumentView`: where a tensor lies in the arguments of a call, so that it is found in those of the next call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Path = tuple[Any, ...]
"""Keys and indices that lead from the arguments to a tensor."""


@dataclass(frozen=True, slots=True)
class ArgumentView:
    """A tensor as a view of an argument, however long that is."""

    path: Path
    dtype: torch.dtype
    row_shape: tuple[int, ...]
    """The argument's shape after its first dimension."""

    argument_strides: tuple[int, ...]
    offset: int
    """Elements from the argument's first to the tensor's."""

    shape: tuple[int | None, ...]
    """The tensor's; None where a dimension is the argument's first."""

    strides: tuple[int, ...]

    def of(self, argument: Tensor) -> Tensor | None:
        """Return the tensor that lies there in an argument; None if the argument has other rows."""
        is_alike = argument.dim() > 0 and argument.dtype is self.dtype and argument.stride() == self.argument_strides
        if not is_alike or tuple(argument.shape[1:]) != self.row_shape:
            return None
        shape = [len(argument) if size is None else size for size in self.shape]
        if 0 not in shape and self.offset + _extent(shape, self.strides) > _extent(argument.shape, argument.stride()):
            return None
        return argument.as_strided(shape, self.strides, argument.storage_offset() + self.offset)


def view_in(path: Path, argument: Tensor, tensor: Tensor) -> ArgumentView | None:
    """Return how a tensor lies in an argument that shares its memory; None if it is no view of it."""
    offset = int(tensor.storage_offset() - argument.storage_offset())
    if argument.dim() == 0 or tensor.dtype is not argument.dtype or offset < 0:
        return None
    shape = tuple(
        None if size == len(argument) and stride == argument.stride(0) else size
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return ArgumentView(
        path, tensor.dtype, tuple(argument.shape[1:]), argument.stride(), offset, shape, tensor.stride()
    )


def tensors_in(value: object, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yield the tensors that have memory in tuples, lists and mappings with their paths; of a jagged one its values."""
    if isinstance(value, Tensor):
        if value.layout is torch.strided and not value.is_nested:
            yield path, value
        elif value.layout is torch.jagged:
            values: Any = value
            yield path, values.values()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, (*path, key))
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for index, item in enumerate(value):
            yield from tensors_in(item, (*path, index))


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements of memory a tensor reaches over."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
