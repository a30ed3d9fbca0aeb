"""`even_cut`, `list_neighbours`: cuts of a chain from which a better one is near (pure).

A cut is where its stages begin and where the last ends, one number more than there are stages.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def even_cut(work: Floats, stages: int) -> Ints:
    """Return the cut of pieces that work so long whose stages work about as long, with a piece at least in each."""
    until, number = np.concatenate([[0.0], np.cumsum(work)]), np.arange(stages + 1)
    nearest = np.abs(until - until[-1] * number[:, None] / stages).argmin(axis=1)
    nearest[-1] = len(work)  # also behind pieces that take no time
    rising = np.maximum.accumulate(nearest - number) + number
    return np.asarray(np.minimum(rising, len(work) - stages + number))


def list_neighbours(cut: Ints) -> Ints:
    """Return the cuts, in rows, in which one stage has a piece less and another one more; those between move on."""
    border = np.arange(len(cut))
    fewer, more = np.indices((len(cut) - 1, len(cut) - 1)).reshape(2, -1, 1)
    later = ((more < border) & (border <= fewer)).astype(np.int64)
    sooner = ((fewer < border) & (border <= more)).astype(np.int64)
    cuts = cut + later - sooner
    return np.asarray(cuts[(fewer != more)[:, 0] & (np.diff(cuts, axis=1) > 0).all(axis=1)])
