"""`SequenceBlocks`: the repeated blocks of a model whose sequence several ranks can share, style `context`.

Ranks may compute parts of a sequence where tokens meet in attention alone. A list of blocks whose every other operator
leaves tokens apart can have the style; whether its code runs on a part is tried on shapes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from phalanx.auto.capture.blocks import is_inside
from phalanx.auto.capture.graph import CapturedStep, Operator, Read
from phalanx.auto.capture.module_calls import ModuleCall
from phalanx.auto.capture.shard_propagation import ShardedDim, propagate
from phalanx.i18n import tr
from phalanx.plan.shape import ParamShape

_TOKENS = -2


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Attention in a call of a module. Bytes are of a global batch."""

    operator: int
    """Position in the captured step."""

    tokens: int
    key_bytes: int
    value_bytes: int
    query_bytes: int
    score_rows: int
    """Queries times heads: each has one score for each key."""

    features: int
    """Of a query of one head."""

    mask_item_bytes: int
    """Bytes of a number of a causal mask; 0 if it is not causal."""


@dataclass(frozen=True, slots=True)
class SequenceBlocks:
    """A list of blocks, as style `context` takes it."""

    path: str
    """Of the list."""

    tokens: int
    calls: range
    """Positions of the calls inside."""

    parameters: tuple[ParamShape, ...]
    attention: dict[int, tuple[AttentionCall, ...]]
    """By position of the call."""

    def degrees(self, ranks: int) -> tuple[int, ...]:
        """Return numbers of ranks, above 1 and rising, that divide this many and can share a sequence."""
        return tuple(n for n in range(2, ranks + 1) if ranks % n == 0 and self.tokens % n == 0)


def find_sequence_blocks(
    model: nn.Module, captured: CapturedStep, calls: Sequence[ModuleCall]
) -> tuple[SequenceBlocks | None, str | None]:
    """Return the blocks whose sequence ranks may share, or why there are none."""
    paths = [path for group in captured.blocks for path in group]
    parents = {path.rpartition(".")[0] for path in paths}
    if not paths:
        return None, tr("context parallel, as the model has no list of repeated blocks")
    parent = next(iter(parents))
    list_of_blocks = model.get_submodule(parent)
    members = {f"{parent}.{name}".lstrip(".") for name, _ in list_of_blocks.named_children()}
    is_list = isinstance(list_of_blocks, nn.ModuleList) or type(list_of_blocks).forward is nn.Sequential.forward
    if len(parents) > 1 or not is_list or members != set(paths):
        return None, tr("context parallel, as the repeated blocks are not the members of one list")
    inside = [position for position, call in enumerate(calls) if is_inside(call.path, paths)]
    span = range(inside[0], inside[-1] + 1)
    if len(span) != len(inside):
        return None, tr("context parallel, as the model computes something between its blocks")
    own = {param.name for param in captured.parameters if is_inside(param.name, paths)}
    outside = (call for position, call in enumerate(calls) if position not in span)
    tied = next((param.name for call in outside for param in call.parameters if param.name in own), None)
    if tied is not None:
        return None, tr("context parallel, as parameter {name!r} is used outside of the blocks too", name=tied)
    walk = _TokenWalk(captured, calls, span)
    if walk.obstacle is not None:
        return None, tr("context parallel, as {why}", why=walk.obstacle)
    parameters = tuple(param for param in captured.parameters if param.name in own)
    return SequenceBlocks(parent, walk.tokens, span, parameters, walk.attention), None


class _TokenWalk:
    """Follows the tokens through the blocks; they may meet in attention."""

    def __init__(self, captured: CapturedStep, calls: Sequence[ModuleCall], span: range) -> None:
        self.obstacle: str | None = None
        self._captured, self.tokens = captured, 0
        self.attention: dict[int, tuple[AttentionCall, ...]] = {}
        self._state: dict[tuple[int, int], ShardedDim | None] = {}
        self._inside = {at for position in span for at in calls[position].operators}
        attentions = [
            (position, at)
            for position in span
            for at in calls[position].operators
            if "attention" in captured.operators[at].name
        ]
        for position, at in attentions:
            self.attention[position] = (*self.attention.get(position, ()), self._read(at))
        if not attentions:
            self.obstacle = tr("its blocks call no torch.nn.functional.scaled_dot_product_attention without dropout")
            return
        self.tokens = next(iter(captured.operators[attentions[0][1]].reads())).value.shape[_TOKENS]
        for at in sorted(self._inside):
            self.obstacle = self._pass(captured.operators[at], at)
            if self.obstacle is not None:
                return

    def _read(self, at: int) -> AttentionCall:
        operator = self._captured.operators[at]
        query, key, value = (read.value for read in tuple(operator.reads())[:3])
        is_causal = any(argument is True for argument in operator.arguments)
        return AttentionCall(
            operator=at,
            tokens=query.shape[_TOKENS],
            key_bytes=key.bytes,
            value_bytes=value.bytes,
            query_bytes=query.bytes,
            score_rows=math.prod(query.shape[:-1]),
            features=query.shape[-1],
            mask_item_bytes=query.bytes // max(1, math.prod(query.shape)) if is_causal else 0,
        )

    def _pass(self, operator: Operator, at: int) -> str | None:
        """Follow tokens through an operator; return why they do not pass, if so."""
        if "attention" in operator.name:
            reads = tuple(operator.reads())
            sharded = self._find(reads[0])
            if any(isinstance(value, float) and value > 0 for value in _dropouts(operator)):
                return tr("its attention drops scores")
            if any(len(read.value.shape) != 4 or self._find(read) != sharded for read in reads[:3]) or (
                sharded is None or (sharded.dim, sharded.parts, sharded.repeats) != (2, self.tokens, 1)
            ):
                return tr("its attention is not of the tokens of a block to each other")
            outputs: tuple[ShardedDim | None, ...] = (sharded, *(None for _ in operator.outputs[1:]))
        else:
            passed = propagate(operator, self._find)
            if passed is None:
                return tr("operator {name} of {module!r} mixes tokens", name=operator.name, module=operator.module)
            outputs = passed
        self._state.update({(at, number): sharded for number, sharded in enumerate(outputs)})
        return None

    def _find(self, read: Read) -> ShardedDim | None:
        if isinstance(read.source, int) and (read.source, read.output) in self._state:
            return self._state[read.source, read.output]
        is_parameter = isinstance(read.source, str) and read.source.startswith("parameter:")
        shape = read.value.shape
        if is_parameter or len(shape) < 2 or shape[_TOKENS] != self.tokens:
            return None
        return ShardedDim(len(shape) + _TOKENS, self.tokens)


def _dropouts(operator: Operator) -> Sequence[Any]:
    return operator.arguments[:5]
