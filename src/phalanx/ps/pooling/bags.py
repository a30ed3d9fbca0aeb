"""`read_bags`: bags of ids in any form that `EmbeddingBag` takes, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.ps.ids import check_ids, check_per_id, offsets_of, values_of

PoolingMode = Literal["sum", "mean", "max"]


@dataclass(frozen=True, slots=True)
class Bags:
    """Ids, and which of them make a bag."""

    mode: PoolingMode
    """How the rows of a bag combine."""

    ids: Tensor
    """Shape (bags, ids per bag) or (ids,)."""

    starts: Tensor
    """Where each bag begins among the flat ids, and the last one ends, shape (bags + 1,), int64, on the CPU.

    It is memory of its own: a script may use that of its offsets for the next batch before the backward pass.
    """

    weights: Tensor | None
    """Factor of each id's row, shape of `ids`."""

    clicks: Tensor | None
    """Clicks of each occurrence, shape of `ids`."""


def read_bags(
    mode: PoolingMode,
    ids: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
    clicks: Tensor | None,
    *,
    has_last_offset: bool,
) -> Bags:
    """Return the bags that the arguments of a call describe.

    Args:
        mode: How the rows of a bag combine.
        ids: Shape (bags, ids per bag), flat with `offsets`, or nested of layout `torch.jagged`.
        offsets: Where each bag begins in flat ids.
        weights: Factor of each id's row, shape of `ids`.
        clicks: Clicks of each occurrence, shape of `ids`.
        has_last_offset: Whether `offsets` end with the number of ids.

    Raises:
        ConfigError: If they do not fit each other.
    """
    check_ids(ids)
    _check_shape(ids, offsets)
    if ids.is_nested:
        flat = values_of(ids, "ids")
        bags = Bags(mode, flat, _copy_starts(offsets_of(ids)), _values(weights), _values(clicks))
    elif offsets is None:
        bags = Bags(mode, ids, torch.arange(len(ids) + 1, device="cpu") * ids.shape[1], weights, clicks)
    else:
        bags = Bags(mode, ids, _read_offsets(offsets, len(ids), has_last_offset), weights, clicks)
    check_per_id("per_sample_weights", bags.weights, bags.ids)
    check_per_id("clicks", bags.clicks, bags.ids)
    return bags


def _values(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else values_of(tensor, "values per id")


def _check_shape(ids: Tensor, offsets: Tensor | None) -> None:
    expected = 2 if offsets is None else 1
    if ids.is_nested and offsets is not None:
        raise ConfigError(
            "ids are a jagged tensor, which has its offsets, and offsets are there too. Give one of them."
        )
    if ids.dim() != expected:
        raise ConfigError(
            "an EmbeddingBag takes ids of shape (bags, ids per bag), flat ids with offsets, or a jagged tensor of "
            f"shape (bags, j); found shape {tuple(ids.shape)} {'without' if offsets is None else 'with'} offsets."
        )


def _read_offsets(offsets: Tensor, total: int, has_last_offset: bool) -> Tensor:
    """Return checked starts of bags of so many flat ids."""
    is_integer = isinstance(offsets, Tensor) and offsets.dtype in (torch.int32, torch.int64)
    if not is_integer or offsets.dim() != 1 or (has_last_offset and not len(offsets)):
        raise ConfigError(
            "offsets must be a tensor of int64 or int32, of shape (bags,), or (bags + 1,) with "
            f"include_last_offset=True; found {_describe(offsets)}."
        )
    starts = _copy_starts(offsets)
    if starts.numel() and not torch.compiler.is_compiling():  # a compiled graph would break at the values
        _check_starts(starts.numpy(), total, has_last_offset)  # which compares small arrays in half the time
    if has_last_offset:
        return starts
    return torch.cat([starts, starts.new_tensor([total if starts.numel() else 0])])


def _copy_starts(offsets: Tensor) -> Tensor:
    return offsets.to("cpu", torch.int64).clone(memory_format=torch.contiguous_format)


def _check_starts(starts: NDArray[np.int64], total: int, has_last_offset: bool) -> None:
    first, last = int(starts[0]), int(starts[-1])
    if first != 0 or last > total or np.count_nonzero(starts[1:] < starts[:-1]):
        raise ConfigError(
            f"offsets must begin at 0, not decrease, and end at {total}, the number of ids, or before; found "
            f"{starts[:3].tolist()} ... {last}."
        )
    if has_last_offset and last != total:
        raise ConfigError(
            f"with include_last_offset=True the last of the offsets is the number of ids, {total}; found {last}."
        )


def _describe(offsets: object) -> str:
    if isinstance(offsets, Tensor):
        return f"dtype {offsets.dtype} and shape {tuple(offsets.shape)}"
    return type(offsets).__name__
