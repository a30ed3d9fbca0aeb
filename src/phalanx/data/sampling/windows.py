"""`shuffle_windows`: shuffling within a window (a shuffle buffer), by index and for streams.

The elements 0 to n - 1 are split into windows of `buffer`, each with its own permutation. Where the first window ends
depends on the seed, so neighbours differ from pass to pass. A buffer that holds everything is one window.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from phalanx.data.sampling.shuffle import mixed_seed, shuffled

T = TypeVar("T")


def shuffle_windows(n: int, buffer: int, seed: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the elements that stand at `positions`, in time proportional to how many they are.

    No element stands more than `buffer` - 1 places from where it was.

    Args:
        n: Number of elements.
        buffer: Elements of a window, at least 1.
        seed: Which permutation.
        positions: Any of 0 to n - 1, shape (k,).
    """
    if buffer == 1 or n == 1:
        return positions
    shift = 0 if buffer >= n else _shift(buffer, seed)
    windows = (positions + shift) // buffer if buffer < n else np.zeros_like(positions)
    elements = np.empty_like(positions)
    for start, stop in _runs(positions, windows):
        window = int(windows[start])
        first = max(window * buffer - shift, 0)
        length = min((window + 1) * buffer - shift, n) - first
        at = int(positions[start]) - first
        elements[start:stop] = first + shuffled(length, mixed_seed(seed, window), at, stop - start)
    return elements


def shuffle_stream_windows(items: Iterable[T], buffer: int, seed: int) -> Iterator[T]:
    """Yield what `shuffle_windows` orders, of items that come one after the other; reads at most `buffer` + 1 ahead."""
    if buffer == 1:
        yield from items
        return
    iterator = iter(items)
    ahead = list(itertools.islice(iterator, buffer + 1))
    shift = 0 if len(ahead) <= buffer else _shift(buffer, seed)
    iterator = itertools.chain(ahead, iterator)
    for number in itertools.count():
        window = list(itertools.islice(iterator, buffer - shift if number == 0 else buffer))
        if not window:
            return
        yield from (window[i] for i in shuffled(len(window), mixed_seed(seed, number), 0, len(window)))


def _shift(buffer: int, seed: int) -> int:
    """Return how many elements the first window lacks."""
    return mixed_seed(seed, buffer) % buffer


def _runs(positions: NDArray[np.int64], windows: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of the runs of neighbouring positions that lie in one window."""
    if not len(positions):
        return
    breaks = np.flatnonzero((np.diff(positions) != 1) | (np.diff(windows) != 0)) + 1
    edges = [0, *breaks.tolist(), len(positions)]
    yield from itertools.pairwise(edges)
