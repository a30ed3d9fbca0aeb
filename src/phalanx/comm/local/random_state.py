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


def seed_all(seed: int, *, cuda: bool = False) -> None:
    """Start the global generators from `seed`, 0 to 2**64 - 1; that of the GPU only if asked to."""
    torch.default_generator.manual_seed(seed)
    if cuda:
        torch.cuda.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


@dataclass(frozen=True, slots=True, eq=False)
class RandomState:
    """What all generators go on from."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    torch: Tensor
    cuda: Tensor | None
    """None where no GPU is in use."""

    @classmethod
    def current(cls) -> RandomState:
        """Return the state now."""
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        return cls(random.getstate(), tuple(np.random.get_state(legacy=True)), torch.get_rng_state(), cuda)

    def restore(self) -> None:
        """Let all generators go on from this state."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        if self.cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.cuda)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Draw from this state inside the block, and go on as before after it."""
        before = RandomState.current()
        self.restore()
        try:
            yield
        finally:
            before.restore()

    def has_changed(self) -> bool:
        """Return whether anything drew random numbers since this state was taken."""
        now = RandomState.current()
        has_cuda_changed = self.cuda is not None and (now.cuda is None or not torch.equal(self.cuda, now.cuda))
        (_, keys, *rest), (_, keys_now, *rest_now) = self.numpy, now.numpy
        return (
            has_cuda_changed
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
        return state if self.cuda is None else {**state, "cuda": self.cuda}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> RandomState:
        """Return what `to_dict` was called on."""
        version, internal, gauss = state["python"]
        kind, keys, *rest = state["numpy"]
        cuda = state.get("cuda")
        return cls(
            (version, tuple(internal.tolist()), gauss),
            (kind, keys.numpy().astype(np.uint32), *rest),
            state["torch"].clone(),
            None if cuda is None else cuda.clone(),
        )
