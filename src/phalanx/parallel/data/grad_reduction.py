"""`GradReduction`: all-reduce of a gradient bucket: flat, in lower precision, or hierarchical."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm.context import Context
from phalanx.comm.groups import Group, group_of
from phalanx.errors import PlanError
from phalanx.parallel.mesh import Mesh
from phalanx.plan.mesh import partition
from phalanx.plan.value import AllReduce

logger = logging.getLogger("phalanx.parallel")


class PendingReduction(Protocol):
    """A bucket on its way."""

    def wait(self) -> object:
        """Return when the bucket holds the sum."""
        ...


class GradReduction(Protocol):
    """Adds up a bucket over ranks."""

    def send(self, flat: Tensor) -> PendingReduction:
        """Begin to add up a one-dimensional tensor over the ranks, in place. Collective, in one order."""
        ...


@dataclass(frozen=True, slots=True)
class FlatAllReduce:
    """One all-reduce."""

    group: Group

    def send(self, flat: Tensor) -> PendingReduction:
        """Begin the all-reduce."""
        work: PendingReduction = dist.all_reduce(flat, group=self.group, async_op=True)
        return work


class WireOverflow(Exception):  # noqa: N818 -- caught where the parameter is known, and then an error of ours
    """A sum of finite numbers is beyond what the dtype on the wire can hold; on all ranks of the wire."""

    def __init__(self, position: int, dtype: torch.dtype) -> None:
        super().__init__(f"element {position} is beyond {dtype}")
        self.position, self.dtype = position, dtype


@dataclass(frozen=True, slots=True)
class LowPrecisionAllReduce:
    """In a smaller dtype; sums are rounded to it."""

    dtype: torch.dtype
    through: GradReduction

    def send(self, flat: Tensor) -> PendingReduction:
        """Begin to send a rounded copy."""
        small = flat.to(self.dtype)
        return _Rounded(flat, small, self.through.send(small), self.through)


@dataclass(frozen=True, slots=True)
class HierarchicalAllReduce:
    """Within each host first; then every rank adds up its slice with the same slice of the other hosts.

    Between hosts each rank sends 1 / ranks-per-host of the bytes, and all of a host's ranks send at once.
    """

    inside: Group
    across: Group
    index: int
    """This rank's place within its host."""

    ranks: int
    """Ranks of a host."""

    def send(self, flat: Tensor) -> PendingReduction:
        """Begin to add up within the host."""
        work = dist.all_reduce(flat, group=self.inside, async_op=True)
        assert work is not None
        return _Inside(self, flat, work)


@dataclass(slots=True)
class _Rounded:
    flat: Tensor
    small: Tensor
    work: PendingReduction
    through: GradReduction

    def wait(self) -> None:
        """Take over the sum.

        Raises:
            WireOverflow: If the smaller dtype could not hold it; the sum is taken over all the same.
        """
        self.work.wait()
        overflow = self._overflow()
        self.flat.copy_(self.small)
        if overflow is not None:
            raise overflow

    def _overflow(self) -> WireOverflow | None:
        # bfloat16 reaches as far as float32: what is not finite in it was none before.
        if self.small.dtype != torch.float16 or bool(self.small.isfinite().all()):
            return None
        # All ranks see the same sum, so all come here, and whether one of them had such a gradient itself is one sum.
        was_finite = bool(self.flat.isfinite().all())
        others = torch.full_like(self.small, float(not was_finite))
        self.through.send(others).wait()
        if bool(others.any()):
            return None
        return WireOverflow(int(self.small.isfinite().logical_not().nonzero()[0]), self.small.dtype)


@dataclass(slots=True)
class _Inside:
    wire: HierarchicalAllReduce
    flat: Tensor
    work: dist.Work

    def wait(self) -> None:
        self.work.wait()
        slices = list(self.flat.tensor_split(self.wire.ranks))
        dist.all_reduce(slices[self.wire.index], group=self.wire.across)
        for owner, piece in enumerate(slices):
            dist.broadcast(piece, group=self.wire.inside, group_src=owner)


def reduction_for(update: AllReduce, axes: tuple[str, ...], mesh: Mesh, context: Context) -> GradReduction:
    """Return how the buckets of an update travel along mesh axes. Collective over all ranks of the job.

    Raises:
        PlanError: If the ranks cannot be cut into hosts of equal size.
    """
    wire: GradReduction = (
        _hierarchical(update, axes, mesh, context)
        if update.route == "hierarchical"
        else FlatAllReduce(mesh.gradient_group(axes))
    )
    return wire if update.wire_dtype is None else LowPrecisionAllReduce(getattr(torch, update.wire_dtype), wire)


def _hierarchical(update: AllReduce, axes: tuple[str, ...], mesh: Mesh, context: Context) -> GradReduction:
    size = update.host_ranks or context.role.local_world_size
    parts = partition(mesh.position.axes, axes)
    by_host = [[list(ranks) for _, ranks in groupby(part, lambda rank: rank // size)] for part in parts]
    inside = {len(ranks) for hosts in by_host for ranks in hosts}
    if size < 2 or len(inside) > 1 or context.world_size % size:
        raise PlanError(
            f"use_hierarchical_allreduce needs hosts of equal size, of 2 ranks or more: found {context.world_size} "
            f"ranks, {size} on this host. Set hierarchical_allreduce_inter_nranks to a number that divides, or turn it "
            "off."
        )
    (count,) = inside
    if count == 1 or len(by_host[0]) == 1:
        if context.rank == 0:
            which = "are on one host" if count > 1 else "that add up gradients are on hosts of their own"
            logger.warning("use_hierarchical_allreduce has no effect: all %d ranks %s.", len(parts[0]), which)
        return FlatAllReduce(mesh.gradient_group(axes))
    hosts = [ranks for part in by_host for ranks in part]
    columns = [[ranks[index] for ranks in part] for part in by_host for index in range(count)]
    within, across = group_of(hosts, "gradients"), group_of(columns, "gradients")
    return HierarchicalAllReduce(within, across, dist.get_rank(within), count)
