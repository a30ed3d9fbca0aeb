"""`RoundLoss`: mean loss of this rank over a global batch, of one batch or of several logical replicas."""

from __future__ import annotations

from torch import Tensor

from phalanx.comm import context
from phalanx.comm.batch.batches import BatchShare


class RoundLoss:
    """Adds up the losses of this rank's logical replicas, by samples."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._rows = 0
        self._replicas: set[int | None] = set()
        self.is_complete = True
        """Whether the batch added last was that of this rank's last replica."""

    def add(self, loss: Tensor, share: BatchShare | None) -> tuple[Tensor, BatchShare | None]:
        """Add a batch; return the mean loss of the replicas so far and their share of the global batch."""
        replicas = context.current().replicas
        is_alone = replicas is None or not replicas.are_shared or len(replicas.local) == 1
        if replicas is None or share is None or (is_alone and not replicas.is_elastic):
            self.is_complete = True
            return loss, share
        if replicas.is_first:
            self._sum, self._rows = None, 0
            self._replicas.clear()
        self.is_complete = replicas.is_last
        if replicas.current in self._replicas and self._sum is not None:  # computed again, where a rank was lost
            return self._sum / max(self._rows, 1), BatchShare(self._rows, share.global_rows)
        self._replicas.add(replicas.current)
        # What does not count may be undefined, so it is not multiplied by zero.
        term = loss * share.rows if share.rows else loss.new_zeros(())
        self._sum = term if self._sum is None else self._sum + term
        self._rows += share.rows
        return self._sum / max(self._rows, 1), BatchShare(self._rows, share.global_rows)


def batches_per_step() -> int:
    """Return how many batches this rank computes of every global batch."""
    replicas = context.current().replicas
    return 1 if replicas is None else len(replicas.local)
