"""`check_ids`: what a table takes as ids, and what makes ids of everything else; jagged tensors as flat values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.ps.stores.base import Keys


def keys_of(ids: Tensor) -> Keys:
    """Return ids of any shape as the keys of a table, int64 in one row.

    Raises:
        ConfigError: If they are no tensor of integers.
    """
    check_ids(ids)
    keys: Keys = ids.reshape(-1).to("cpu", torch.int64).contiguous().numpy()
    return keys


def check_ids(ids: object) -> None:
    """Raise unless ids are a tensor of integers; it may be nested.

    Raises:
        ConfigError: If they are no tensor of integers; says what makes one of them.
    """
    if not isinstance(ids, Tensor):
        raise ConfigError(f"ids must be a tensor of integers, found {_describe(ids)}")
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype is torch.bool:
        raise ConfigError(f"ids must be integers, found dtype {ids.dtype}. Convert them with ids.long().")


def check_per_id(name: str, values: Tensor | None, ids: Tensor) -> None:
    """Raise unless there is one value for each id, or no values.

    Raises:
        ConfigError: If the shapes differ.
    """
    if values is not None and values.shape != ids.shape:
        raise ConfigError(
            f"{name} have shape {tuple(values.shape)}, and the ids {tuple(ids.shape)}. Give one for each id."
        )


def _describe(ids: object) -> str:
    """Return what something other than a tensor is, and how to make ids of it."""
    kind = type(ids).__name__
    if isinstance(ids, np.ndarray) and ids.dtype.kind in "iu":
        return f"{kind} of {ids.dtype}. Convert it with torch.from_numpy."
    if not isinstance(ids, Sequence | np.ndarray) or isinstance(ids, str | bytes) or not len(ids):
        return f"{kind}. Convert it with torch.tensor."
    first = ids[0]
    if isinstance(first, str | bytes):
        return f"{kind} of {type(first).__name__}. Hash the texts: phalanx.ps.hash_ids(texts, salt)."
    if isinstance(first, Sequence | np.ndarray | Tensor):
        return (
            f"{kind} of {type(first).__name__}. Where lengths differ, make a jagged tensor of it: "
            "torch.nested.nested_tensor(ids, layout=torch.jagged); else convert it with torch.tensor."
        )
    return f"{kind} of {type(first).__name__}. Convert it with torch.tensor."


def values_of(tensor: Tensor, name: str) -> Tensor:
    """Return the values of a jagged tensor, shape (total, ...), and any other tensor as it is.

    Raises:
        ConfigError: If it is nested in another way.
    """
    if not tensor.is_nested:
        return tensor
    nested: Any = tensor  # torch's stubs do not know what nested tensors have
    # A transposed or narrowed jagged tensor has its values in another order, or more than belong to it.
    if tensor.layout is not torch.jagged or nested.lengths() is not None or nested._ragged_idx != 1:
        layout = "transposed or narrowed" if tensor.layout is torch.jagged else f"of layout {tensor.layout}"
        raise ConfigError(
            f"{name} are a nested tensor {layout}, which a table cannot look up. Make it with "
            "torch.nested.nested_tensor(rows, layout=torch.jagged), or torch.nested.nested_tensor_from_jagged."
        )
    values: Tensor = nested.values()
    return values


def offsets_of(jagged: Any) -> Tensor:
    """Return where each row of a jagged tensor begins, and the last one ends, shape (rows + 1,)."""
    offsets: Tensor = jagged.offsets()
    return offsets


def like_jagged(source: Tensor, values: Tensor) -> Tensor:
    """Return a jagged tensor of the lengths of `source` with other values, shape (total, ...)."""
    jagged: Tensor = torch.nested.nested_tensor_from_jagged(values, offsets_of(source))
    return jagged
