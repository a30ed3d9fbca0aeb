"""`RingShift`: a tensor on its way to the next rank of a ring, while that of the rank before arrives."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm.groups import Group
from phalanx.comm.transfers import peers_named


class RingShift:
    """One step around the ranks of a group. Collective over it: every rank shifts, in the same order.

    Returns at once; what is computed until `wait` overlaps with the transfer as far as the backend moves bytes by
    itself.

    Args:
        x: Contiguous, the same shape and dtype on all ranks. Must not change until `wait` returns.
        group: The ranks; the next of the last is the first.

    Raises:
        PeerLostError: If a rank was lost; also of `wait`.
    """

    def __init__(self, x: Tensor, group: Group) -> None:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self._group, self._sent, self._arriving = group, x, torch.empty_like(x)
        messages = [
            dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % ranks),
            dist.P2POp(dist.irecv, self._arriving, group=group, group_peer=(rank - 1) % ranks),
        ]
        with peers_named("a shift around the ring", group):
            self._works = dist.batch_isend_irecv(messages)

    def wait(self) -> Tensor:
        """Return the tensor of the rank before."""
        with peers_named("a shift around the ring", self._group):
            for work in self._works:
                work.wait()
        return self._arriving
