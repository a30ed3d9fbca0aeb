"""`UpdateGroup`: the global batches of one update, where the script's loop accumulates gradients over several.

On a rank that holds several logical replicas the loop calls `optimizer.step()` after k of its batches, which are less
than k global batches. The first such call tells k; the update waits for the call at the end of k global batches.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class UpdateGroup:
    """How far this rank is with the global batches of one update."""

    turns: int = 0
    """Turns with a backward pass."""

    rounds: int = 0
    """Global batches whose last turn of this rank was one of them."""

    length: int | None = None
    """After how many global batches the loop updates; None until a step of an optimizer was called."""

    left: int | None = None
    """Global batches that the epoch has from the start of the group on; None where that is not known."""

    defers: bool = False
    """Whether gradients are added up over the replicas at its last global batch only: the loop uses `px.no_sync`."""

    is_over: bool = False
    """Whether the update was made."""

    spans_epochs: bool = False
    """Whether an epoch ended inside it."""

    @property
    def is_open(self) -> bool:
        """Whether gradients wait for the update."""
        return self.turns > 0 and not self.is_over

    @property
    def size(self) -> int | None:
        """Global batches of the group: the last one of an epoch takes what is left of it. None if not known yet."""
        return min((number for number in (self.length, self.left) if number is not None), default=None)

    @property
    def is_complete(self) -> bool:
        """Whether the update may follow: no further global batch belongs to the group."""
        return self.rounds == self.size

    @property
    def ends_epoch(self) -> bool:
        """Whether the group has the last global batch of an epoch, and is over with it."""
        return self.rounds == self.left
