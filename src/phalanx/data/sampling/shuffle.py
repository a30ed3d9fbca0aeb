"""`shuffled`: a random permutation computed by index (Feistel network), without a table.

The native core computes it. The NumPy twin below gives the same bits, is what the native code is tested
against and takes over where the package was installed without a compiler. The method and its sources:
`csrc/shuffle.h`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from phalanx.data.sampling.hash64 import GOLDEN, WORD, mix64, mix_one
from phalanx.errors import ConfigError
from phalanx.versions import HAS_NATIVE

if HAS_NATIVE:
    from phalanx import _core

MAX_ROWS = 2**62
"""Most samples a permutation can order."""

_ROUNDS = 8


def shuffled(n: int, seed: int, start: int, count: int, step: int = 1) -> NDArray[np.int64]:
    """Return part of the permutation of [0, n) that `seed` picks.

    Costs time in `count` alone. The element at a position does not depend on the cut into calls.

    Args:
        n: Number of samples, 1 to 2**62.
        seed: Any integer; taken modulo 2**64.
        start: First position, 0 to n - 1.
        count: How many positions.
        step: Distance from one position to the next, at least 1.

    Returns:
        The elements at start, start + step, ..., shape (count,).

    Raises:
        ConfigError: If n is out of range or a position falls outside [0, n).
    """
    _check(n, start, count, step)
    if not HAS_NATIVE:
        return shuffled_numpy(n, seed, start, count, step)
    return _core.shuffled(n, seed & WORD, start, count, step)


def shuffled_numpy(n: int, seed: int, start: int, count: int, step: int = 1) -> NDArray[np.int64]:
    """Return the same elements as `shuffled`, computed with NumPy alone."""
    positions = np.uint64(start) + np.arange(count, dtype=np.uint64) * np.uint64(step)
    network = _Network(n, seed)
    elements = network.apply(positions)
    outside = np.flatnonzero(elements >= n)
    while outside.size:
        elements[outside] = network.apply(elements[outside])
        outside = outside[elements[outside] >= n]
    return elements.astype(np.int64)


def mixed_seed(*words: int) -> int:
    """Return one 64-bit seed from several integers; (a, b) and (b, a) give different ones."""
    state = 0
    for word in words:
        state = mix_one((state + word + GOLDEN) & WORD)
    return state


def hash_numbers(values: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """Return a 64-bit hash of each number, shape (n,); another one for every seed."""
    return mix64(values ^ np.uint64(seed & WORD))


class _Network:
    """The Feistel network over the smallest power of two that holds [0, n)."""

    def __init__(self, n: int, seed: int) -> None:
        bits = (n - 1).bit_length()
        low_bits = (bits + 1) // 2
        self.low_bits = np.uint64(low_bits)
        self.low_mask = np.uint64(2**low_bits - 1)
        self.high_mask = np.uint64(2 ** (bits - low_bits) - 1)
        words = [(seed + GOLDEN * (i + 1)) & WORD for i in range(_ROUNDS)]
        self.keys = mix64(np.array(words, dtype=np.uint64))

    def apply(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        high, low = values >> self.low_bits, values & self.low_mask
        for even, odd in self.keys.reshape(-1, 2):
            high ^= mix64(low ^ even) & self.high_mask
            low ^= mix64(high ^ odd) & self.low_mask
        return high << self.low_bits | low


def _check(n: int, start: int, count: int, step: int) -> None:
    if not 1 <= n <= MAX_ROWS:
        raise ConfigError(f"Asked to shuffle {n} samples; a shuffle holds 1 to 2**62. Give a dataset of that size.")
    if count < 0 or step < 1 or start < 0 or (count > 0 and start + (count - 1) * step >= n):
        raise ConfigError(
            f"Asked for {count} positions from {start} in steps of {step}, but the epoch has positions "
            f"0 to {n - 1}. Ask for positions inside it, with a step of at least 1."
        )
