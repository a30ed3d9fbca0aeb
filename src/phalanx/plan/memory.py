"""`memory_of`: memory of one rank under a Plan: parameters, gradients and optimizer state, exact (pure)."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from rich.table import Table as Grid

from phalanx.plan.buckets import MARK_BITS, all_reduce_buckets
from phalanx.plan.mesh import Position, reduced_along, slice_shape
from phalanx.plan.rules.mesh import STAGE_AXIS
from phalanx.plan.shape import ModelShape, ParamShape
from phalanx.plan.stages import shares_of
from phalanx.plan.value import OnRanks, ParamRule, Plan, ReduceScatter, TopK

_LOW = ("bfloat16", "float16")


@dataclass(frozen=True, kw_only=True, slots=True)
class StateOf:
    """What an optimizer keeps for each parameter that it trains."""

    tensors: int
    """Tensors as large as the parameter."""

    scalar_bytes: int = 0
    """Bytes of numbers beside them, such as a count of steps."""

    momentum: bool = False
    """Whether it is SGD with momentum, which deep gradient compression keeps in its place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of one rank after a step; what is gathered or sent during a step, and activations, come on top."""

    parameters: int
    gradients: int
    """With the flags, marks and padding of their buckets."""

    optimizer: int = 0
    """State that the optimizer keeps, float32 copies of parameters in lower precision among it."""

    residuals: int = 0
    """What has not been sent yet (deep gradient compression), and its momentum."""

    averages: int = 0
    """The exponential moving average of the weights."""

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self))


def memory_of(
    plan: Plan, shape: ModelShape, rank: int = 0, state: StateOf | None = None, *, averaged: bool = False
) -> Memory:
    """Return what a rank holds of a model. Pure.

    Buffers of the model are not counted; where gradients are all-reduced, those that travel come once more.

    Args:
        plan: The Plan.
        shape: The model's parameters as they are trained, whole.
        rank: Which rank; where a dim does not divide, the last hold less.
        state: What its optimizer keeps, once it has made a step; nothing when None.
        averaged: Whether an EMA of the weights is kept.
    """
    share = _share(plan, shape, rank)
    along = _sharded_along(plan, shape)
    parameters = [_Held.of(param, plan, rank, along) for param in share.params]
    trained = [parameter for parameter in parameters if parameter.param.trainable]
    beside = 0
    if plan.world_size > 1:
        buckets = all_reduce_buckets(plan, share)
        beside = sum((len(bucket.params) + 2 * MARK_BITS) * bucket.params[0].item_bytes for bucket in buckets)
    return Memory(
        parameters=sum(parameter.stored * parameter.param.item_bytes for parameter in parameters),
        gradients=sum(parameter.stored * parameter.param.item_bytes for parameter in trained) + beside,
        optimizer=sum(_state_bytes(plan, parameter, state) for parameter in trained),
        residuals=sum(_residual_bytes(plan, parameter, state) for parameter in trained),
        averages=sum(parameter.elements * _wide(parameter.param) for parameter in parameters) if averaged else 0,
    )


def memory_table(memory: Memory, rank: int) -> Grid:
    """Return it as a table, kinds of which there is something."""
    title = f"Memory of rank {rank} between steps"
    grid = Grid(title=title, title_justify="left", min_width=len(title))
    grid.add_column("kind")
    grid.add_column("bytes", justify="right")
    for field in fields(memory):
        size = getattr(memory, field.name)
        if size:
            grid.add_row(field.name, f"{size:,}")
    return grid


@dataclass(frozen=True, slots=True)
class _Held:
    """What one rank holds of one parameter, in elements."""

    param: ParamShape
    rule: ParamRule
    elements: int
    stored: int
    """Elements of the memory behind it: `fully_shard` pads all slices to the largest."""

    @classmethod
    def of(cls, param: ParamShape, plan: Plan, rank: int, along: tuple[str, ...]) -> _Held:
        rule = plan.rule_for(param.name)
        if not isinstance(rule.place, OnRanks):
            return cls(param, rule, 0, 0)
        shape, position = slice_shape(plan, param, rank), Position(plan.mesh, rank)
        if position.count(along) == 1 or not shape:
            return cls(param, rule, math.prod(shape), math.prod(shape))
        largest = -(-shape[0] // position.count(along))
        mine = min(max(shape[0] - position.index(along) * largest, 0), largest)
        rest = math.prod(shape[1:])
        return cls(param, rule, mine * rest, largest * rest)


def _share(plan: Plan, shape: ModelShape, rank: int) -> ModelShape:
    """Return the parameters of this rank's stages."""
    return shares_of(plan, shape)[Position(plan.mesh, rank).index((STAGE_AXIS,)) if plan.mesh else 0]


def _sharded_along(plan: Plan, shape: ModelShape) -> tuple[str, ...]:
    """Return the axes along which a whole model is cut, frozen parameters among it; none if it is not."""
    for param in shape.trainable:
        update = plan.rule_for(param.name).update
        if isinstance(update, ReduceScatter):
            return plan.step.batch_axes if update.along is None else update.along
    return ()


def _has_copy(plan: Plan, param: ParamShape) -> bool:
    return param.dtype in _LOW and any(rule.pure for rule in plan.modules)


def _wide(param: ParamShape) -> int:
    """Return the bytes of an element in float32, or wider."""
    return max(param.item_bytes, 4)


def _state_bytes(plan: Plan, parameter: _Held, state: StateOf | None) -> int:
    copy = 4 * parameter.elements if _has_copy(plan, parameter.param) else 0
    if state is None:
        return copy
    update = parameter.rule.update
    is_elsewhere = (
        isinstance(update, TopK) and state.momentum and not update.rampup_begin_step and _travels(plan, parameter)
    )
    item = 4 if copy else parameter.param.item_bytes
    return copy + (0 if is_elsewhere else state.tensors) * item * parameter.elements + state.scalar_bytes


def _travels(plan: Plan, parameter: _Held) -> bool:
    """Return whether other ranks add to its gradient; without them nothing is compressed."""
    return bool(reduced_along(plan, parameter.rule))


def _residual_bytes(plan: Plan, parameter: _Held, state: StateOf | None) -> int:
    update = parameter.rule.update
    if not isinstance(update, TopK) or not _travels(plan, parameter):
        return 0
    tensors = (state is not None and state.momentum) + (parameter.elements >= update.dense_below)
    return tensors * parameter.elements * parameter.param.item_bytes
