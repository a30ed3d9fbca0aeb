"""`sum_rows`, `digest_rows`: a few numbers for each row of a batch, by which rows of two runs are compared."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from phalanx.comm.batch.loaded_batches import tensors_in

MOST_ROWS = 8192
"""Of a batch; larger ones are not looked at by the row."""


def sum_rows(tensor: Tensor) -> Any:
    """Return the sum and the sum of magnitudes of every row, in float64."""
    rows = tensor.detach().reshape(len(tensor), -1)
    rows = torch.view_as_real(rows).flatten(1) if rows.is_complex() else rows
    wide = rows.double()
    return torch.stack([wide.sum(1), wide.abs().sum(1)], 1).cpu().numpy()


def digest_rows(inputs: Any) -> list[int]:
    """Return a checksum of each row of what came into a model, over all tensors with as many rows as the first."""
    tensors = [t.detach() for t in tensors_in(inputs) if t.dim() and t.layout is torch.strided]
    if not tensors or len(tensors[0]) > MOST_ROWS:
        return []
    sums = [0] * len(tensors[0])
    for tensor in tensors:
        if len(tensor) == len(sums) and tensor.numel():
            data = tensor.contiguous().cpu().reshape(len(sums), -1).view(torch.uint8).numpy()
            sums = [zlib.crc32(memoryview(row), before) for row, before in zip(data, sums, strict=True)]
    return sums
