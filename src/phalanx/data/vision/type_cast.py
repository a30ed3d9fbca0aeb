"""`TypeCast`: convert images or labels to another dtype."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from phalanx.data.sampling.row_rng import Draws
from phalanx.data.vision.transform import Transform
from phalanx.errors import ConfigError, did_you_mean

_NAMES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")


class TypeCast(Transform):
    """Gives samples another element type.

    Args:
        dtype: A torch or NumPy type, or its name, such as `int32`.

    Raises:
        ConfigError: If there is no such type.
    """

    def __init__(self, dtype: torch.dtype | type | str) -> None:
        self.dtype = _read(dtype)

    def batched(self, samples: Tensor, draws: Draws) -> Tensor:
        """See `Transform`."""
        return samples.to(self.dtype)


def _read(dtype: torch.dtype | type | str) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    try:
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    except TypeError:
        name = repr(dtype)
    if name not in _NAMES:
        raise ConfigError(f"TypeCast got {name!r}.{did_you_mean(name, _NAMES)} Give one of {', '.join(_NAMES)}.")
    torch_dtype: torch.dtype = getattr(torch, name)
    return torch_dtype
