"""State that training keeps beside model and optimizer, told by whoever keeps it, so that checkpoints hold it.

    keep_state(optimizer, "residuals", residuals, elsewhere="share")

Whatever a rank accumulates between steps belongs here: gradients not sent yet, counters of steps, running scales.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import nn
from torch.optim import Optimizer

from phalanx.errors import InternalError

Elsewhere = Literal["first", "mean", "share", "drop"]
"""What becomes of state at another number of ranks: rank 0's for all; tensors averaged over the saved ranks; their sum
dealt out in equal shares; dropped, which is a warning. Numbers are always rank 0's."""


class Keeper(Protocol):
    """Keeps state of this rank."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return numbers, text and tensors, in dicts, lists and tuples."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Take over what `state_dict` returned, on this rank or on another number of ranks."""
        ...


@dataclass(frozen=True, slots=True)
class Kept:
    """One keeper, and what becomes of its state at another number of ranks."""

    keeper: Keeper
    elsewhere: Elsewhere


_kept: weakref.WeakKeyDictionary[nn.Module | Optimizer, dict[str, Kept]] = weakref.WeakKeyDictionary()


def keep_state(owner: nn.Module | Optimizer, name: str, keeper: Keeper, *, elsewhere: Elsewhere) -> None:
    """Let checkpoints of a model or optimizer hold the state of a keeper, which lives as long as its owner.

    Args:
        owner: The model or optimizer that is saved and loaded.
        name: Name of the state, one for each keeper of an owner.
        keeper: Keeps it; must not refer to the owner, save weakly.
        elsewhere: What becomes of the state at another number of ranks.
    """
    entries = _kept.setdefault(owner, {})
    if name in entries:
        raise InternalError(f"two keepers of state {name!r} of one {type(owner).__name__}")
    entries[name] = Kept(keeper, elsewhere)


def kept_state(owner: nn.Module | Optimizer | None) -> dict[str, Kept]:
    """Return the keepers of a model's or optimizer's state, by name."""
    return {} if owner is None else dict(_kept.get(owner, {}))
