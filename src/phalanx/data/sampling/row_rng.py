"""`Draws`: vectorised random numbers for many samples, one stream per sample.

What a sample draws is a function of its seed alone, so it does not depend on the rank, worker or batch it is loaded in.
A generator object for each sample would cost 15 us a sample; a counter that is mixed costs nothing worth measuring
(`data/sampling/hash64.py`; G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators", 2014).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.data.sampling.hash64 import GOLDEN, WORD, mix64
from phalanx.data.sampling.shuffle import hash_numbers, mixed_seed


class Draws:
    """The random numbers of n samples; each call yields the next one of every sample.

    How many calls an operation makes may not depend on a sample's pixels or numbers: then one sample alone draws what
    it draws among others.

    Args:
        seeds: One 64-bit seed for each sample, shape (n,).
        drawn: How many numbers each sample has drawn already.
    """

    def __init__(self, seeds: NDArray[np.uint64], drawn: int = 0) -> None:
        self.seeds, self._drawn = seeds, drawn

    @classmethod
    def of_rows(cls, seed: int, epoch: int, rows: Sequence[int] | NDArray[np.int64]) -> Draws:
        """Return the numbers that `rows` draw in one epoch of a run.

        Args:
            seed: The run's seed.
            epoch: Or any number that changes whenever the same samples draw new numbers.
            rows: What tells the samples of an epoch apart, such as their positions.
        """
        return cls(hash_numbers(np.asarray(rows, np.int64).astype(np.uint64), mixed_seed(seed, epoch)))

    @classmethod
    def from_torch(cls, rows: int) -> Draws:
        """Return numbers that follow from torch's global generator, which is only asked if one is drawn."""
        return _FromTorch(rows)

    def __len__(self) -> int:
        return len(self.seeds)

    def row(self, index: int) -> Draws:
        """Return the numbers of one sample from here on; they are not taken from this object's."""
        return Draws(self.seeds[index : index + 1], self._drawn)

    def skip_like(self, other: Draws) -> None:
        """Count as drawn what `other`, a sample of this object, has drawn."""
        self._drawn = other._drawn

    def uniform(self, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Return a number in [low, high) for every sample, float64 of shape (n,)."""
        unit = (self.words() >> np.uint64(11)) * 2.0**-53
        return torch.from_numpy(low + (high - low) * unit)

    def integers(self, count: int) -> Tensor:
        """Return an integer in [0, count) for every sample, int64 of shape (n,); `count` is at most 2**32."""
        return torch.from_numpy((((self.words() >> np.uint64(32)) * np.uint64(count)) >> np.uint64(32)).view(np.int64))

    def words(self) -> NDArray[np.uint64]:
        """Return 64 random bits for every sample, shape (n,)."""
        self._drawn += 1
        return mix64(self.seeds + np.uint64(GOLDEN * self._drawn & WORD))


class _FromTorch(Draws):
    def __init__(self, rows: int) -> None:
        self._rows, self._drawn = rows, 0

    def __len__(self) -> int:
        return self._rows

    @cached_property
    def seeds(self) -> NDArray[np.uint64]:  # type: ignore[override]
        words = torch.randint(-(2**63), 2**63 - 1, (self._rows,), dtype=torch.int64)
        return words.numpy().view(np.uint64)
