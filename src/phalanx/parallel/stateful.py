"""`keep_state`: register extra state of a model or optimizer that checkpoints must contain.

    keep_state(optimizer, "residuals", residuals, elsewhere="share")

Whatever a rank accumulates between steps belongs here: gradients not sent yet, counters of steps, running scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import nn
from torch.optim import Optimizer

from phalanx.errors import InternalError
from phalanx.parallel.session import model_record, optimizer_record, session

Elsewhere = Literal["first", "mean", "share", "drop"]
"""What becomes of state at another number of ranks: rank 0's for all; tensors averaged over the saved ranks; their sum
dealt out in equal shares; dropped, which is a warning. Numbers are always rank 0's."""


class Stateful(Protocol):
    """Has state of this rank."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return numbers, text and tensors, in dicts, lists and tuples."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Take over what `state_dict` returned, on this rank or on another number of ranks."""
        ...


@dataclass(frozen=True, slots=True)
class SavedState:
    """The state of one object, and what becomes of it at another number of ranks."""

    source: Stateful
    elsewhere: Elsewhere


def keep_state(owner: nn.Module | Optimizer, name: str, state: Stateful, *, elsewhere: Elsewhere) -> None:
    """Let checkpoints of a model or optimizer hold the state of an object, which lives as long as its owner.

    Args:
        owner: The model or optimizer that is saved and loaded.
        name: Name of the state, unique to its owner.
        state: Has it; must not refer to the owner, save weakly.
        elsewhere: What becomes of the state at another number of ranks.
    """
    record = optimizer_record(owner) if isinstance(owner, Optimizer) else model_record(owner)
    if name in record.saved_state:
        raise InternalError(f"state {name!r} of one {type(owner).__name__} was registered twice")
    record.saved_state[name] = SavedState(state, elsewhere)


def saved_state_of(owner: nn.Module | Optimizer | None) -> dict[str, SavedState]:
    """Return the state beside a model's or optimizer's own that checkpoints hold, by name."""
    if owner is None:
        return {}
    record = session.optimizers.get(owner) if isinstance(owner, Optimizer) else session.models.get(owner)
    return {} if record is None else dict(record.saved_state)
