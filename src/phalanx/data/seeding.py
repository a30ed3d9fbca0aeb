"""Random numbers of data code: one seed for torch, NumPy and `random` at once."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run a block with torch's CPU, NumPy's and Python's global generators started from `seed`.

    What they were before is put back, so the data of a batch neither follows from nor disturbs the training's
    own random numbers (dropout, initial weights).

    Args:
        seed: 0 to 2**64 - 1.
    """
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
