"""`ring_attention`: exact attention over the tokens of all ranks, of which no rank ever holds all keys and values.

Keys and values go around the ranks (Liu et al., arXiv:2310.01889). At each step a rank attends with its queries to the
keys it has at the moment, and merges what it gets with what it had; meanwhile the next keys arrive. In the backward
pass keys and values go around again, and their gradients travel with them, one step behind, until they are home. Kept
between the passes are a rank's own queries, keys, values and outputs, and one number for each query and head.

With a causal mask a rank skips what its queries may not see. If each rank has a chunk of the beginning and one of the
end (`ShardSpec.zigzag`), half of the pairs of each step are left for every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.comm.collectives import apply_function
from phalanx.parallel.tensor.context.attention_parts import PartialAttention, attend, attend_backward, merge
from phalanx.parallel.tensor.context.ring_shift import RingShift
from phalanx.parallel.tensor.shard_spec import ShardSpec

_TOKENS = -2


class _Region(NamedTuple):
    """Which of a rank's queries meet which of the keys of another rank."""

    queries: tuple[int, int]
    """First, and how many."""

    keys: tuple[int, int]
    is_causal: bool
    """Whether they are the same tokens, each of which sees those up to itself."""


@dataclass(frozen=True, slots=True)
class RingCall:
    """One call of attention."""

    spec: ShardSpec
    """How tokens are dealt to ranks."""

    scale: float
    is_causal: bool

    def region(self, source: int) -> _Region | None:
        """Return what this rank computes with the keys of another; None if its queries see none of them."""
        tokens, index = self.spec.mine, self.spec.index
        whole, half = (0, tokens), tokens // 2
        if not self.is_causal or source == index:
            return _Region(whole, whole, self.is_causal)
        if self.spec.zigzag:
            is_before = source < index
            return _Region(whole if is_before else (half, half), (0, half) if is_before else whole, is_causal=False)
        return _Region(whole, whole, is_causal=False) if source < index else None

    def mask_of(self, mask: Tensor | None, source: int) -> Tensor | None:
        """Return the columns of a mask that are those of the keys of a rank."""
        if mask is None or mask.shape[-1] == 1:
            return mask
        return self.spec.of_rank(source).part(mask, mask.dim() - 1)


def ring_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, call: RingCall) -> Tensor:
    """Return the attention of this rank's queries to the keys of all. Collective over the group.

    Args:
        query: (B, H, T, D), T the tokens of each rank.
        key: (B, H, T, D), or fewer heads, each for as many consecutive heads of queries.
        value: As `key`; the number of features may differ.
        mask: (..., T, tokens of all ranks in their order), bool or numbers to add to scores; without gradients.
        call: The rest.

    Returns:
        Shape (B, H, T, features of values), dtype of queries.
    """
    return apply_function(_RingAttention, query, key, value, mask, call)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, call: RingCall) -> Tensor:
        merged: PartialAttention | None = None
        for source, (keys, values) in _around(key, value, call):
            part = _attend_to(source, query, keys, values, mask, call)
            if part is not None:
                merged = part if merged is None else _merge_rows(merged, part)
        assert merged is not None  # every rank attends to its own keys first
        output = _tokens_outermost(merged.output.to(query.dtype))
        ctx.call = call
        ctx.save_for_backward(query, key, value, mask, output, merged.log_sum)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kind = grads[0].device.type
        # A script may call backward under autocast too, which would round scores that forward did not.
        with torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext():
            return (*_to_inputs(grads[0], ctx.call, *ctx.saved_tensors), None, None)


def _to_inputs(
    grad: Tensor,
    call: RingCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    output: Tensor,
    log_sum: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, those of keys and values sent once around the ring."""
    wide = log_sum.dtype
    to_query = torch.zeros_like(query, dtype=wide)
    behind: RingShift | None = None
    for source, (keys, values) in _around(key, value, call):
        to_key, to_value = (torch.zeros_like(x, dtype=wide) for x in (keys, values))
        region = call.region(source)
        if region is not None:
            rows, columns = region.queries, region.keys
            added = attend_backward(
                grad.narrow(_TOKENS, *rows),
                query.narrow(_TOKENS, *rows),
                keys.narrow(_TOKENS, *columns),
                values.narrow(_TOKENS, *columns),
                call.mask_of(mask, source),
                PartialAttention(output.narrow(_TOKENS, *rows), log_sum.narrow(-1, *rows)),
                call.scale,
                is_causal=region.is_causal,
            )
            to_query.narrow(_TOKENS, *rows).add_(added.query)
            to_key.narrow(_TOKENS, *columns).copy_(added.key)
            to_value.narrow(_TOKENS, *columns).copy_(added.value)
        packed = _pack(to_key, to_value)
        if behind is not None:  # what the ranks before computed for these keys
            packed += behind.wait()
        behind = RingShift(packed, call.spec.group)
    assert behind is not None  # there are steps
    to_key, to_value = _unpack(behind.wait(), key, value)
    return to_query.to(query.dtype), to_key.to(key.dtype), to_value.to(value.dtype)


def _tokens_outermost(output: Tensor) -> Tensor:
    """Return an output whose heads lie together in memory, as torch's kernels leave them."""
    if output.dim() < 3:
        return output
    return output.transpose(-3, _TOKENS).contiguous().transpose(-3, _TOKENS)


def _around(key: Tensor, value: Tensor, call: RingCall) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """Yield each rank's number with its keys and values, this rank's first; those to come arrive in the meantime."""
    ranks, source, packed = len(call.spec.sizes), call.spec.index, _pack(key, value)
    for step in range(ranks):
        shift = RingShift(packed, call.spec.group) if step < ranks - 1 else None
        yield source, _unpack(packed, key, value)
        if shift is not None:
            packed, source = shift.wait(), (source - 1) % ranks


def _pack(key: Tensor, value: Tensor) -> Tensor:
    return torch.cat([key.detach().reshape(-1), value.detach().reshape(-1)])


def _unpack(packed: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = packed.split([key.numel(), value.numel()])
    return keys.view(key.shape), values.view(value.shape)


def _attend_to(
    source: int, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, call: RingCall
) -> PartialAttention | None:
    """Return what this rank's last queries get from the keys of a rank; None if they see none of them."""
    region = call.region(source)
    if region is None:
        return None
    return attend(
        query.narrow(_TOKENS, *region.queries),
        keys.narrow(_TOKENS, *region.keys),
        values.narrow(_TOKENS, *region.keys),
        call.mask_of(mask, source),
        call.scale,
        is_causal=region.is_causal,
    )


def _merge_rows(merged: PartialAttention, part: PartialAttention) -> PartialAttention:
    """Return attention with what the last queries, or all of them, got from more keys."""
    more = part.log_sum.shape[-1]
    before = merged.log_sum.shape[-1] - more
    if not before:
        return merge(merged, part)
    last = merge(
        PartialAttention(merged.output.narrow(_TOKENS, before, more), merged.log_sum.narrow(-1, before, more)), part
    )
    return PartialAttention(
        torch.cat([merged.output.narrow(_TOKENS, 0, before).to(last.output.dtype), last.output], _TOKENS),
        torch.cat([merged.log_sum.narrow(-1, 0, before), last.log_sum], -1),
    )
