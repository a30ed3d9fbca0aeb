"""`RandomState`, `seed_all`: the random generators of this process: Python's, NumPy's, torch's and its GPU's."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx import accelerator

_DEVICE_KEY = accelerator.CUDA
"""What checkpoints call the state of the GPU's random numbers, whatever its maker."""


def seed_all(seed: int, *, device: torch.device | None = None) -> None:
    """Start the global generators from `seed`, 0 to 2**64 - 1, and that of a device that is not the CPU."""
    torch.default_generator.manual_seed(seed)
    if device is not None:
        accelerator.seed_device(device, seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


@dataclass(frozen=True, slots=True, eq=False)
class RandomState:
    """What all generators continue from."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    torch: Tensor
    device_state: Tensor | None
    """That of the GPU; None where none is in use."""

    @classmethod
    def current(cls) -> RandomState:
        """Return the state now."""
        device = accelerator.device_in_use()
        state = None if device is None else accelerator.random_state(device)
        return cls(random.getstate(), tuple(np.random.get_state(legacy=True)), torch.get_rng_state(), state)

    def restore(self) -> None:
        """Let all generators continue from this state."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        device = None if self.device_state is None else accelerator.current_device()
        if device is not None and self.device_state is not None:
            accelerator.set_random_state(device, self.device_state)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Draw from this state inside the block, and continue as before after it."""
        before = RandomState.current()
        self.restore()
        try:
            yield
        finally:
            before.restore()

    def has_changed(self) -> bool:
        """Return whether anything drew random numbers since this state was taken."""
        now = RandomState.current()
        ours, theirs = self.device_state, now.device_state
        has_device_changed = ours is not None and (theirs is None or not torch.equal(ours, theirs))
        (_, keys, *rest), (_, keys_now, *rest_now) = self.numpy, now.numpy
        return (
            has_device_changed
            or not torch.equal(self.torch, now.torch)
            or self.python != now.python
            or rest != rest_now
            or not np.array_equal(keys, keys_now)
        )

    def to_dict(self) -> dict[str, Any]:
        """Return numbers, text and tensors in tuples, as checkpoints hold them."""
        version, internal, gauss = self.python
        kind, keys, *rest = self.numpy
        state = {
            "python": (version, torch.tensor(internal, dtype=torch.int64), gauss),
            "numpy": (kind, torch.from_numpy(np.array(keys, dtype=np.int64)), *rest),
            "torch": self.torch,
        }
        return state if self.device_state is None else {**state, _DEVICE_KEY: self.device_state}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> RandomState:
        """Return what `to_dict` was called on."""
        version, internal, gauss = state["python"]
        kind, keys, *rest = state["numpy"]
        on_device = state.get(_DEVICE_KEY)
        return cls(
            (version, tuple(internal.tolist()), gauss),
            (kind, keys.numpy().astype(np.uint32), *rest),
            state["torch"].clone(),
            None if on_device is None else on_device.clone(),
        )
