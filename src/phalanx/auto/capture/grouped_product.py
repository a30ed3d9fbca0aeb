"""`run_grouped_product`: torch's product of one matrix for each group of rows, on fake tensors of any dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

GROUPED = torch.ops.aten._grouped_mm.default


def run_grouped_product(
    left: Tensor, right: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Return the output of `torch.nn.functional.grouped_mm` without values.

    torch's own rule for fake tensors takes bfloat16 alone, while its kernels take float32 and float16 too.

    Args:
        left: Of shape (rows, k), or (groups, rows, k).
        right: Of shape (groups, k, n), or (k, n).
        offs: Where each group ends; needed if `left` or `right` has two dimensions.
        bias: Changes no shape.
        out_dtype: Of the output; that of `left` when None.
    """
    if left.dim() == right.dim() == 2:  # groups along k
        assert offs is not None
        shape = [offs.shape[0], left.shape[0], right.shape[1]]
    else:
        shape = (
            [left.shape[-2], right.shape[-1]] if 2 in (left.dim(), right.dim()) else [*left.shape[:2], right.shape[-1]]
        )
    return left.new_empty(shape, dtype=out_dtype or left.dtype)
