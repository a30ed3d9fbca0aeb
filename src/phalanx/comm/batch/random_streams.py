"""`RandomStreams`: random numbers of several logical replicas in one process, each going on where its rank's were.

A run without logical replicas draws one sequence of random numbers on each rank. Where fewer ranks go on with it, each
of those sequences goes on as that of a replica; the generators of the process are those of one replica at a time.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

RandomState = Mapping[str, Any]
"""The state of the generators of a process, as `random_state` returns it."""


class RandomStreams:
    """The random numbers of the logical replicas of a job.

    Args:
        states: Of every replica. The generators of this process are set to the first one of `local`.
        local: The replicas of this rank.
    """

    def __init__(self, states: Mapping[int, RandomState], local: range) -> None:
        self._states = {replica: states[replica] for replica in local}
        self._current = local[0]
        set_random_state(self._states[self._current])

    def switch(self, replica: int) -> None:
        """Let the generators of this process be those of a replica of this rank."""
        if replica == self._current:
            return
        self._states[self._current] = random_state()
        set_random_state(self._states[replica])
        self._current = replica

    def states(self) -> dict[int, RandomState]:
        """Return where the replicas of this rank are now."""
        return {**self._states, self._current: random_state()}


def random_state() -> dict[str, Any]:
    """Return the state of the random generators of this process: Python's, NumPy's, torch's and the GPU's."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "python": (version, torch.tensor(internal, dtype=torch.int64), gauss),
        "numpy": (kind, torch.from_numpy(np.array(keys, dtype=np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: RandomState) -> None:
    """Restore the random generators of this process."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal.tolist()), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"].clone())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].clone())
