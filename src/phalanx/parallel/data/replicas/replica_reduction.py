"""`ReplicaReduction`: the gradients of one bucket or unit, from each replica's to what the ranks add up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm.batch.replicas import Replicas
from phalanx.comm.elastic.membership import wait_for
from phalanx.comm.groups import Group
from phalanx.parallel.data.grad_reduction import PendingReduction
from phalanx.parallel.data.replicas.replica_sums import (
    PartialSums,
    adds_up_in_tree,
    exchange_sums,
    is_one_branch_each,
    wide,
)


class ReplicaReduction:
    """The partial sums of this rank's replicas of one bucket or unit.

    Args:
        replicas: Those of the job.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._sums = PartialSums(replicas.count)
        self._in_tree: tuple[tuple[Sequence[int], ...], torch.device, bool] | None = None
        """Whether a collective of the group adds up the tree, of the replicas of each rank and a device."""

    def add(self, value: Tensor, group: Callable[[], Group], *, is_last: bool) -> Tensor | PartialSums | None:
        """Put aside what the replica whose turn it is has computed; return what the ranks are to add up, at the last.

        Args:
            value: One-dimensional; `wide` in what is returned, unless every rank holds one replica.
            group: Returns the ranks that hold replicas now.
            is_last: Whether no further replica of this rank comes.

        Returns:
            None before the last. A tensor where the group's own collective adds up ranks in the tree, on all of them.
            Else the partial sums, which the ranks have to exchange. In an elastic job both stay here: they may be
            needed again.
        """
        replicas, sums = self._replicas, self._sums
        is_alone = replicas.count == len(replicas.by_rank) and not replicas.is_elastic
        if is_alone and self._is_in_tree(value, group):
            return value
        current = replicas.local[0] if replicas.current is None else replicas.current
        if not sums.has(current):  # else computed again, where a rank was lost
            sums.add(range(current, current + 1), wide(value))
        if not is_last:
            return None
        if not replicas.is_elastic:
            self._sums = PartialSums(replicas.count)
        return sums.sums[0][1] if self._is_in_tree(value, group) else sums

    def send(self, flat: Tensor, group: Callable[[], Group], *, is_last: bool) -> PendingReduction | None:
        """Begin to add up what `add` takes over all replicas, in place; None before the last. Collective then."""
        own = self.add(flat, group, is_last=is_last)
        if own is None:
            return None
        if isinstance(own, PartialSums):
            return _Taken(flat, exchange_sums(own, self._replicas.by_rank, group()), None)
        if own.dtype is flat.dtype:
            if own is not flat:
                flat.copy_(own)
            return _all_reduce(flat, group())
        total = own.clone() if self._replicas.is_elastic else own
        return _Taken(flat, total, _all_reduce(total, group()))

    def clear(self) -> None:
        """Forget the partial sums."""
        self._sums.clear()

    def _is_in_tree(self, value: Tensor, group: Callable[[], Group]) -> bool:
        """Return whether a collective over the ranks' own sums adds up the tree: each rank has one branch of it."""
        by_rank, before = self._replicas.by_rank, self._in_tree
        if before is not None and before[0] is by_rank and before[1] == value.device and not self._replicas.is_elastic:
            return before[2]
        is_in_tree = len(by_rank) > 1 and is_one_branch_each(by_rank) and adds_up_in_tree(group(), value)
        self._in_tree = by_rank, value.device, is_in_tree
        return is_in_tree


def _all_reduce(flat: Tensor, group: Group) -> PendingReduction:
    return _Pending(dist.all_reduce(flat, group=group, async_op=True))


@dataclass(slots=True)
class _Pending:
    """A collective under way, in place."""

    work: Any

    def wait(self) -> None:
        """Wait for it, at most until a member of an elastic job is lost."""
        wait_for(self.work)


@dataclass(slots=True)
class _Taken:
    """A sum in memory of its own, on its way into a bucket."""

    flat: Tensor
    total: Tensor
    work: PendingReduction | None

    def wait(self) -> None:
        """Take over the sum."""
        if self.work is not None:
            self.work.wait()
        self.flat.copy_(self.total)
