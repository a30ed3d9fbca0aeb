"""`ReplicaAssignment`: which replicas this rank computes next, after the members of an elastic job have changed."""

from __future__ import annotations

from phalanx.comm.batch.replicas import Replicas, assign_replicas
from phalanx.comm.context import Context
from phalanx.parallel.elastic.progress import Agreement


class ReplicaAssignment:
    """What becomes of the assignment of replicas to ranks.

    Args:
        context: Tells which of how many ranks this one is.
        replicas: Those of the job.
    """

    def __init__(self, context: Context, replicas: Replicas) -> None:
        self._context, self._replicas = context, replicas
        self.took_over = -1
        """The global batch in which replicas were taken over last."""

        self._is_moved = False
        """Whether the assignment is to be made anew at the next global batch."""

        self._shares: tuple[tuple[int, ...], ...] | None = None
        """The replicas of each rank in the global batch that comes next, where others have begun it."""

    def take(self, agreement: Agreement, *, is_later: bool) -> None:
        """Take up this rank's part of what members have agreed on.

        Args:
            agreement: That.
            is_later: Whether this rank does so when it begins its next global batch, as others know.
        """
        self._shares = None
        if is_later:
            self._shares, self._is_moved = agreement.shares, True
        elif agreement.shares is None:
            self._renew()
        else:
            self._replicas.take_over(agreement.shares, self._context.rank)
            self._is_moved = True
        if agreement.shares is not None:
            self.took_over = agreement.committed

    def take_shares(self) -> bool:
        """Take over the replicas of a global batch that others have begun; return whether there are any."""
        if self._shares is None:
            return False
        self._replicas.take_over(self._shares, self._context.rank)
        self._shares = None
        return True

    def renew(self) -> None:
        """Share all replicas out evenly, if the ranks have changed since that was done last."""
        if self._is_moved:
            self._renew()

    def _renew(self) -> None:
        self._is_moved = False
        assignment = assign_replicas(self._replicas.count, self._context.world_size)
        self._replicas.reassign(assignment, self._context.rank)
