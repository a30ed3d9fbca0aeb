"""`seeded`: run a block with torch, NumPy and `random` started from a seed."""

from __future__ import annotations

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator
from torch import Tensor
from torch.utils.data import get_worker_info

from phalanx.comm.local.random_state import seed_all
from phalanx.data.sampling import python_state

_spare = np.random.MT19937(0)
"""Takes the place of NumPy's global generator for a while, which is faster than copying its state out and in."""


class seeded:  # noqa: N801 - used as a function is
    """Run a block with the global generators started from a seed: `with seeded(seed): ...`.

    What they were before is put back, so the data of a batch neither follows from nor disturbs the training's
    own random numbers (dropout, initial weights). A data worker has none of these, and nothing is put back there.

    Args:
        seed: 0 to 2**64 - 1.
    """

    # A class: a generator function made a context manager costs 2 us more, for every batch.
    __slots__ = ("_numpy_generator", "_python_state", "_seed", "_torch_state")

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __enter__(self) -> None:
        self._torch_state: Tensor | None = None
        if get_worker_info() is None:
            self._torch_state, self._python_state = torch.default_generator.get_state(), python_state.read()
            self._numpy_generator = get_bit_generator()
            set_bit_generator(_spare if self._numpy_generator is not _spare else np.random.MT19937(0))
        seed_all(self._seed)

    def __exit__(self, *raised: object) -> None:
        if self._torch_state is not None:
            torch.default_generator.set_state(self._torch_state)
            python_state.put_back(self._python_state)
            set_bit_generator(self._numpy_generator)
