"""Ranks on a mesh: which rank has which coordinates, and which ranks lie along some of its axes. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from phalanx.plan.value import Axis, OnRanks, ParamRule, Plan, Shard


@dataclass(frozen=True, slots=True)
class Position:
    """One rank's place on a mesh whose first axis varies slowest."""

    axes: tuple[Axis, ...]
    rank: int

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's coordinate along every axis."""
        found, rest = {}, self.rank
        for axis in reversed(self.axes):
            rest, found[axis.name] = divmod(rest, axis.size)
        return {axis.name: found[axis.name] for axis in self.axes}

    def count(self, names: Collection[str]) -> int:
        """Return how many ranks lie along these axes."""
        return math.prod(axis.size for axis in self.axes if axis.name in names)

    def index(self, names: Collection[str]) -> int:
        """Return which of the ranks along these axes this one is, in mesh order."""
        mine, index = self.coordinates, 0
        for axis in self.axes:
            if axis.name in names:
                index = index * axis.size + mine[axis.name]
        return index

    def ranks_along(self, names: Collection[str]) -> tuple[int, ...]:
        """Return the ranks that differ from this one along these axes only, itself among them, in mesh order."""
        mine = self.coordinates
        spans = [range(a.size) if a.name in names else (mine[a.name],) for a in self.axes]
        return tuple(_rank(self.axes, found) for found in itertools.product(*spans))


def partition(axes: Sequence[Axis], names: Collection[str]) -> list[tuple[int, ...]]:
    """Return all ranks of a mesh in groups that lie along these axes, in order of their first ranks."""
    world = math.prod(axis.size for axis in axes)
    return sorted({Position(tuple(axes), rank).ranks_along(names) for rank in range(world)})


def sharded_along(rule: ParamRule) -> tuple[str, ...]:
    """Return the mesh axes along which a rule's parameters are cut into shards."""
    layout = rule.place.layout if isinstance(rule.place, OnRanks) else {}
    return tuple(name for name, placed in layout.items() if isinstance(placed, Shard))


def reduced_along(plan: Plan, rule: ParamRule) -> tuple[str, ...]:
    """Return the mesh axes along which a parameter's gradients are added up, in mesh order; size 1 left out.

    Those that carry other rows for it, without the axes along which it is cut: their layers' collectives bring the
    gradients of all rows to the shard. A layer that says nothing of its shards does all of it.
    """
    cut = sharded_along(rule)
    if rule.managed == "module" and not cut:
        return ()
    axes = getattr(rule.update, "axes", None)
    carried = plan.step.batch_axes if axes is None else axes
    return tuple(a.name for a in plan.mesh if a.name in carried and a.name not in cut and a.size > 1)


def _rank(axes: Sequence[Axis], coordinates: Sequence[int]) -> int:
    rank = 0
    for axis, coordinate in zip(axes, coordinates, strict=True):
        rank = rank * axis.size + coordinate
    return rank
