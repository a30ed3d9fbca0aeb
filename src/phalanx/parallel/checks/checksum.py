"""`checksum`: checksums of tensors, for comparing replicas between ranks.

A sum over the words of a tensor, each times an odd 64-bit number that follows from its place, modulo 2**64. One word
that differs always shows; several escape with a chance of about 2**-32. Equal bits give equal sums on every device.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from phalanx.data.sampling.hash64 import GOLDEN, WORD, mix64

_BLOCK = 1 << 14
"""Words that have a factor of their own; blocks have one each too."""

_BLOCKS = 16
"""Blocks multiplied at once, so that products stay in the cache."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}
"""Dtype in which the memory of elements of some bytes is read. At most half a word of the sum wide: flipping the
highest bit of an even number of 64-bit words would not show."""


def checksum(tensor: Tensor) -> Tensor:
    """Return the checksum of a dense tensor's elements, in order, whatever its strides.

    Returns:
        A scalar of dtype int64, on the tensor's device.
    """
    words = _words(tensor)
    factors = _factors(words.device)
    blocks = words.numel() // _BLOCK
    rest = words[blocks * _BLOCK :]
    whole = _products(words[: blocks * _BLOCK].view(-1, _BLOCK), factors)
    by_block = torch.cat([whole, _products(rest.view(1, -1), factors[: rest.numel()])])
    steps = torch.arange(1, len(by_block) + 1, device=words.device) * _signed(GOLDEN) | 1
    return (by_block * steps).sum()


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the checksums of tensors by name; waits for the device once."""
    if not tensors:
        return {}
    sums = torch.stack([checksum(tensor) for tensor in tensors.values()])
    return dict(zip(tensors, sums.tolist(), strict=True))


def combined(sums: Mapping[str, object]) -> int:
    """Return one signed 64-bit number for named checksums, or what stands for them as text."""
    text = ";".join(f"{name}={value}" for name, value in sorted(sums.items()))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _products(blocks: Tensor, factors: Tensor) -> Tensor:
    """Return the sum of every row of words, each times its factor. Overflow wraps, alike in torch and NumPy."""
    if blocks.device.type == "cpu":  # several times as fast as torch, and without memory for the products
        # Not by .numpy(), after which torch resizes the storage no more, as sharding does.
        return torch.from_numpy(np.einsum("ij,j->i", np.from_dlpack(blocks), np.from_dlpack(factors)))
    sums = [(some * factors).sum(1) for some in blocks.split(_BLOCKS)]
    return torch.cat(sums)


def _words(tensor: Tensor) -> Tensor:
    data = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return data.view(-1).view(_WORDS[data.element_size()])


@functools.cache
def _factors(device: torch.device) -> Tensor:
    mixed = mix64(np.arange(1, _BLOCK + 1, dtype=np.uint64)) | np.uint64(1)
    return torch.from_numpy(mixed.view(np.int64)).to(device)


def _signed(word: int) -> int:
    return word - (WORD + 1) if word >> 63 else word
