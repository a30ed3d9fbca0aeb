"""`values_of`: nested tensors of layout `torch.jagged` as flat values, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.errors import ConfigError


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
