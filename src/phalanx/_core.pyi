"""Native core of Phalanx."""

import numpy
import numpy.typing

def shuffled(n: int, seed: int, start: int, count: int, step: int = 1) -> numpy.typing.NDArray[numpy.int64]:
    """Elements at start, start + step, ... of the permutation of [0, n) that `seed` picks."""
