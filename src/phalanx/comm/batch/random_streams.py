"""`RandomStreams`: random numbers of several logical replicas in one process, each continuing where its rank's were.

A run without logical replicas draws a sequence of random numbers on each rank. Where fewer ranks continue with it, each
of those sequences continues as that of a replica; the generators of the process are those of one replica at a time.
"""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.comm.local.random_state import RandomState


class RandomStreams:
    """The random numbers of the logical replicas of a job.

    Args:
        states: Of every replica. The generators of this process are set to the first one of `local`.
        local: The replicas of this rank.
    """

    def __init__(self, states: Mapping[int, RandomState], local: range) -> None:
        self._states = {replica: states[replica] for replica in local}
        self._current = local[0]
        self._states[self._current].restore()

    def switch(self, replica: int) -> None:
        """Let the generators of this process be those of a replica of this rank."""
        if replica == self._current:
            return
        self._states[self._current] = RandomState.current()
        self._states[replica].restore()
        self._current = replica

    def states(self) -> dict[int, RandomState]:
        """Return where the replicas of this rank are now."""
        return {**self._states, self._current: RandomState.current()}
