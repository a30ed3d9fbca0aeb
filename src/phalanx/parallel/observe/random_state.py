"""`random_states`, `have_moved`, `with_random_states`: torch's generators as they were before a forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

RandomStates = Mapping[str, Tensor]
"""By kind of device; of a GPU only where one is in use."""


def random_states() -> RandomStates:
    """Return the state of torch's generators, of the processor and of this process's GPU."""
    states = {"cpu": torch.get_rng_state()}
    return {**states, "cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else states


def have_moved(states: RandomStates) -> bool:
    """Return whether anything drew random numbers since these states."""
    now = random_states()
    return any(not torch.equal(state, now[name]) for name, state in states.items())


@contextmanager
def with_random_states(states: RandomStates) -> Iterator[None]:
    """Let torch draw from these states inside the block, and go on as before after it."""
    before = random_states()
    _restore(states)
    try:
        yield
    finally:
        _restore(before)


def _restore(states: RandomStates) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
