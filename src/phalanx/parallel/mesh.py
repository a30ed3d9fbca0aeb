"""`Mesh`: this rank's coordinates on the mesh of a Plan, and its process groups along the axes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from phalanx.comm.context import Context, DataParallelRank
from phalanx.comm.groups import Group, group_of
from phalanx.plan.mesh import Position, partition
from phalanx.plan.value import Plan


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank's place on the mesh of a Plan, and the groups of ranks along its axes."""

    position: Position
    batch_axes: tuple[str, ...]
    device_type: str
    replicas: int | None = None
    """Logical replicas over which training batches are split, where the Plan asks for them."""

    @classmethod
    def of(cls, plan: Plan, context: Context) -> Mesh:
        """Return the mesh of a Plan as this process sees it."""
        return cls(Position(plan.mesh, context.rank), plan.step.batch_axes, context.device.type, plan.step.replicas)

    def size(self, names: Collection[str]) -> int:
        """Return how many ranks lie along these axes."""
        return self.position.count(names)

    def index(self, names: Collection[str]) -> int:
        """Return which of the ranks along these axes this one is."""
        return self.position.index(names)

    def group(self, names: Collection[str]) -> Group:
        """Return the group of the ranks that differ from this one along these axes only; None when it is all ranks.

        Collective over all ranks of the job, the first time for these axes.
        """
        world = self.position.count([axis.name for axis in self.position.axes])
        if self.size(names) == world:
            return None
        return group_of(partition(self.position.axes, names))

    def gradient_group(self, names: Collection[str]) -> Group:
        """Return the ranks of `group` as a group for gradients alone.

        Gradients travel when a backward pass has them all, which may be sooner on one rank than on another; calls that
        layers make in between (synchronised batch normalisation) must not be taken for them. Collective, as `group` is.
        """
        world = [tuple(range(self.position.count([axis.name for axis in self.position.axes])))]
        everyone = self.size(names) == len(world[0])
        return group_of(world if everyone else partition(self.position.axes, names), "gradients")

    def axes(self) -> dict[str, tuple[Group, int]]:
        """Return, of every axis, the group of this rank along it and its size; no group along an axis of one rank.

        Collective, as `group` is.
        """
        return {a.name: (self.group((a.name,)) if a.size > 1 else None, a.size) for a in self.position.axes}

    def readers(self) -> DataParallelRank:
        """Return which of the rows of a global batch this rank reads. Collective, as `group` is."""
        axes = self.batch_axes
        return DataParallelRank(self.index(axes), self.size(axes), self.group(axes), self.replicas)

    def device_mesh(self, *names: str) -> DeviceMesh:
        """Return torch's mesh of these axes, in this order. Collective."""
        sizes = {axis.name: axis.size for axis in self.position.axes}
        order = [*(name for name in sizes if name not in names), *names]  # torch takes axes out of a mesh in its order
        ranks = (
            torch.arange(self.size(order)).view(*sizes.values()).permute([list(sizes).index(name) for name in order])
        )
        return DeviceMesh(self.device_type, ranks, mesh_dim_names=tuple(order))[names]
