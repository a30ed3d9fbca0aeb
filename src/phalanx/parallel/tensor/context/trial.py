"""`share_on_shapes`: let modules compute a part of a sequence as one rank would, without other ranks.

All that style `context` refuses is refused here too, as it is the same code: on tensors without values a trial costs a
pass, where training would raise at its first step.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.parallel.tensor.context.attention import SequenceAttention
from phalanx.parallel.tensor.context.shard import SequenceShard, check_context, wrap_members
from phalanx.parallel.tensor.shard_spec import ShardSpec
from phalanx.plan.styles import ContextAttention

_TOKENS = -2


def share_on_shapes(
    model: nn.Module, name: str, ranks: int, rows: Collection[int], way: ContextAttention = "all_gather"
) -> None:
    """Let a module of a model compute the first rank's part of each sequence, in place.

    Args:
        model: The whole model, on the device `meta`.
        name: Of the module.
        ranks: How many share a sequence.
        rows: Numbers of samples that ranks have, one of which may be that of the tokens.
        way: How keys and values would reach other ranks.

    Raises:
        PlanError: If it can be seen that the module takes no part of a sequence.
    """
    module = model.get_submodule(name)
    check_context(model, [(name, module)])
    part = _ShardOnShapes(name, ranks, rows, way)
    wrap_members(module, part)
    model.register_forward_hook(part.look)


class _ShardOnShapes(SequenceShard):
    """Refuses what a rank would, and sends nothing."""

    def __init__(self, name: str, ranks: int, rows: Collection[int], way: ContextAttention) -> None:
        super().__init__(name, _TOKENS, ShardSpec(None, 0, (1,) * ranks), way)
        self._attention = _AttentionOnShapes(self._spec, way, self._error)
        self._rows = rows

    def _scatter(self, value: Tensor, dim: int, spec: ShardSpec) -> Tensor:
        return spec.part(value, dim)

    def _copy(self, value: Tensor, spec: ShardSpec) -> Tensor:
        return value

    def _gather(self, output: Tensor, dim: int, spec: ShardSpec) -> Tensor:
        return torch.cat([output] * len(spec.sizes), dim)

    def _has_rows(self, x: Tensor, count: int) -> bool:
        return count in self._rows

    def _drop(self, input: Tensor, p: float) -> Tensor:
        return F.dropout(input, p)


class _AttentionOnShapes(SequenceAttention):
    """Attends to as many keys as there are queries; keys and values of others would come another way."""

    def _attend_in_ring(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **named: Any) -> Tensor:
        return self._gathered(query, key, value, None, **named)

    def _gathered(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, **named: Any
    ) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, **named)
