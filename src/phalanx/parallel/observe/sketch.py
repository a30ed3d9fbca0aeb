"""`sketch`: a few numbers that stand for a tensor, from which differences of tensors can be measured.

A sketch is linear: that of a sum is the sum of the sketches. So the distance of two tensors, and whether one is the
mean or a multiple of others, follow from sketches alone, of any size and any number of ranks. (Charikar, Chen and
Farach-Colton, "Finding frequent items in data streams", 2002: each entry is added with a random sign to a bucket.)
Beside them stand the sum and the sum weighted by position: of tensors that differ in a single entry these tell which.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BUCKETS = 64
SUM, MOMENT, SQUARES, LARGEST, NOT_FINITE = range(BUCKETS, BUCKETS + 5)
"""What follows the buckets: sum, sum of (index + 1) times entry, sum of squares, largest magnitude, and the number of
entries that are not finite, which count as 0 in all others. The first two are linear as the buckets are."""

SIZE = BUCKETS + 5
_BLOCK = 1 << 16

Sketch = NDArray[np.float64]


def sketch(tensor: Tensor) -> Sketch:
    """Return the sketch of a tensor, in float64; complex entries count as two."""
    flat = _flat(tensor)
    result = np.zeros(SIZE)
    signs = _signs()
    for start in range(0, flat.size, _BLOCK):
        block = flat[start : start + _BLOCK].astype(np.float64)
        finite = np.isfinite(block)
        if not finite.all():
            result[NOT_FINITE] += block.size - int(finite.sum())
            block = np.where(finite, block, 0.0)
        total = float(block.sum())
        result[SUM] += total
        result[MOMENT] += float(block @ np.arange(1, block.size + 1)) + start * total
        result[SQUARES] += float(block @ block)
        result[LARGEST] = max(result[LARGEST], float(np.abs(block).max(initial=0.0)))
        signed = np.zeros(_BLOCK)
        signed[: block.size] = block * signs[: block.size]
        turn = -1.0 if (start // _BLOCK * 2654435761 >> 7) & 1 else 1.0
        result[:BUCKETS] += turn * signed.reshape(-1, BUCKETS).sum(0)
    return result


def norm(values: Sketch) -> float:
    """Return the norm of the tensor that a sketch stands for, exact."""
    return float(np.sqrt(values[SQUARES]))


def distance(first: Sketch, second: Sketch) -> float:
    """Return the norm of the difference of two tensors, to about a tenth."""
    return float(np.linalg.norm(first[:BUCKETS] - second[:BUCKETS]))


def single_difference(first: Sketch, second: Sketch, size: int) -> tuple[int, float] | None:
    """Return the index and amount by which two tensors differ in one entry alone; None if they differ in more."""
    amount, moment = (float(first[at] - second[at]) for at in (SUM, MOMENT))
    apart = first[:BUCKETS] - second[:BUCKETS]
    touched = np.flatnonzero(np.abs(apart) > 1e-9 * (np.abs(first[:BUCKETS]) + np.abs(second[:BUCKETS]) + 1e-300))
    if amount == 0.0 or len(touched) != 1:
        return None
    index = moment / amount - 1
    nearest = round(index)
    is_exact = abs(index - nearest) < 0.25 and 0 <= nearest < size and nearest % BUCKETS == touched[0]
    return (nearest, amount) if is_exact else None


def digest(tensor: Tensor) -> int:
    """Return 63 bits that stand for the bits of a tensor's entries, in order."""
    data = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return int.from_bytes(hashlib.blake2b(data.numpy().tobytes(), digest_size=8).digest(), "little") >> 1


def _flat(tensor: Tensor) -> NDArray[Any]:
    data = tensor.detach()
    data = torch.view_as_real(data) if data.is_complex() else data
    data = data.contiguous().cpu().reshape(-1)
    if data.dtype in (torch.bfloat16, torch.float16):
        data = data.float()
    return data.numpy()


@functools.cache
def _signs() -> Sketch:
    return np.random.default_rng(20260101).choice(np.array([-1.0, 1.0]), _BLOCK)
