"""`mix64`: the 64-bit hash behind all seeds and random streams; equal to `csrc/mix.h`.

The 64-bit finaliser known as Stafford's variant 13 (G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number
generators", 2014). It is a bijection that spreads well; it keeps no secret. It may not change: snapshots are cut by it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

WORD = 2**64 - 1
"""The largest word; `& WORD` takes an integer modulo 2**64."""

GOLDEN = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio, made odd: the step of a counter whose mixed values are a stream."""

_MULTIPLIERS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix64(words: Words) -> Words:
    """Return the mixed words: a bijection of the 64-bit numbers in which every bit depends on every bit."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_MULTIPLIERS[0])
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_MULTIPLIERS[1])
    return words ^ (words >> np.uint64(31))


def mix_one(word: int) -> int:
    """Return what `mix64` does to one number; NumPy would take ten times as long for it."""
    word = (word ^ (word >> 30)) * _MULTIPLIERS[0] & WORD
    word = (word ^ (word >> 27)) * _MULTIPLIERS[1] & WORD
    return word ^ (word >> 31)
