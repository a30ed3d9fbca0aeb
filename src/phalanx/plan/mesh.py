"""`Position`: coordinates of a rank on a mesh, and the groups of ranks along its axes (pure)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from phalanx.errors import PlanError
from phalanx.plan.shape import ParamShape
from phalanx.plan.value import Axis, OnRanks, ParamRule, Plan, Shard


@dataclass(frozen=True, slots=True)
class Position:
    """One rank's place on a mesh whose first axis varies slowest."""

    axes: tuple[Axis, ...]
    rank: int

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's coordinate along every axis."""
        index, rest = {}, self.rank
        for axis in reversed(self.axes):
            rest, index[axis.name] = divmod(rest, axis.size)
        return {axis.name: index[axis.name] for axis in self.axes}

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
        return tuple(_rank(self.axes, coordinates) for coordinates in itertools.product(*spans))


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


def rows_brought_along(plan: Plan, rule: ParamRule) -> tuple[str, ...]:
    """Return the axes along which a layer's parameters are cut and rows too: its collectives bring rows to shards."""
    return tuple(axis for axis in sharded_along(rule) if axis in plan.step.batch_axes and plan.axis_size(axis) > 1)


def slice_shape(plan: Plan, param: ParamShape, rank: int | None = None) -> tuple[int, ...]:
    """Return the shape of what a rank holds of a parameter on ranks; of the largest slice when no rank is given.

    A shape that its layer holds is that of a slice already.

    Raises:
        PlanError: If its rule cuts it where it cannot be cut.
    """
    rule, shape = plan.rule_for(param.name), list(param.shape)
    layout = rule.place.layout if isinstance(rule.place, OnRanks) and not param.is_distributed else {}
    for axis, placed in layout.items():
        if not isinstance(placed, Shard):
            continue
        if not -len(shape) <= placed.dim < len(shape):
            raise PlanError(
                f"params[{rule.match}] cuts dim {placed.dim} of {param.name!r}, whose shape is {list(param.shape)}. "
                "Name one of its dims."
            )
        even, rest = divmod(shape[placed.dim], plan.axis_size(axis))
        sizes = placed.sizes or tuple(even + (index < rest) for index in range(plan.axis_size(axis)))
        if sum(sizes) != shape[placed.dim]:
            raise PlanError(
                f"params[{rule.match}] cuts dim {placed.dim} of {param.name!r}, which has {shape[placed.dim]}, into "
                f"{list(sizes)}. Give sizes that add up to it."
            )
        shape[placed.dim] = max(sizes) if rank is None else sizes[Position(plan.mesh, rank).index((axis,))]
    return tuple(shape)


def _rank(axes: Sequence[Axis], coordinates: Sequence[int]) -> int:
    rank = 0
    for axis, coordinate in zip(axes, coordinates, strict=True):
        rank = rank * axis.size + coordinate
    return rank


def is_sum_of_ranks(plan: Plan) -> bool:
    """Return whether gradients are summed over the ranks, not averaged."""
    return any(getattr(rule.update, "reduce", "mean") == "sum" for rule in plan.params)
