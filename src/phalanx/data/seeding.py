"""Random numbers of data code: one seed for torch, NumPy and `random` at once."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator
from torch.utils.data import get_worker_info

_spare = np.random.MT19937(0)
"""Takes the place of NumPy's global generator for a while, which is faster than copying its state out and in."""


def seed_all(seed: int) -> None:
    """Start torch's CPU, NumPy's and Python's global generators from `seed`, 0 to 2**64 - 1."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run a block with the global generators started from `seed`.

    What they were before is put back, so the data of a batch neither follows from nor disturbs the training's
    own random numbers (dropout, initial weights). A data worker has none of these, and nothing is put back there.

    Args:
        seed: 0 to 2**64 - 1.
    """
    if get_worker_info() is not None:
        seed_all(seed)
        yield
        return
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    numpy_generator = get_bit_generator()
    set_bit_generator(_spare if numpy_generator is not _spare else np.random.MT19937(0))
    try:
        seed_all(seed)
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        set_bit_generator(numpy_generator)
