"""`SequenceAttention`: attention of this rank's queries to the keys of a sequence whose tokens several ranks share.

Either every rank gathers all keys and values (Grattafiori et al., arXiv:2407.21783, section 3.3.2), whose gradients
come back by a reduce-scatter, or they go around the ranks (`ring_attention`) and no rank ever holds all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.comm import collectives
from phalanx.errors import ConfigError
from phalanx.parallel.tensor.context.ring_attention import RingCall, ring_attention
from phalanx.parallel.tensor.shard_spec import ShardSpec
from phalanx.plan.styles import ContextAttention

TOKENS = -2
"""Dim of tokens in what attention takes, and in most activations."""

_MASKS = 2
"""Causal masks that are kept for the next layers: one for each of a rank's chunks."""


def deal_tokens(spec: ShardSpec, tokens: int) -> ShardSpec:
    """Return how a sequence is dealt to ranks that have so many tokens each: in a zigzag where halves are even."""
    return replace(spec, sizes=(tokens,) * len(spec.sizes), zigzag=tokens % 2 == 0)


class SequenceAttention:
    """Does what `F.scaled_dot_product_attention` would of whole sequences. Collective over the group.

    Args:
        spec: Names the ranks; one size for each.
        way: How keys and values reach other ranks.
        error: Makes an error of what the module does.
    """

    def __init__(self, spec: ShardSpec, way: ContextAttention, error: Callable[[str], ConfigError]) -> None:
        self._spec, self._way, self._error = spec, way, error
        self._causal_masks: dict[tuple[Any, ...], Tensor] = {}

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **named: Any,
    ) -> Tensor:
        """Return the attention of this rank's queries to the keys of all; shapes (..., tokens, features)."""
        if dropout_p > 0:
            raise self._error(
                f"drops attention scores (dropout_p={dropout_p}), of which ranks would drop the same. Set it to 0; "
                "dropouts of activations may stay"
            )
        tokens = query.shape[TOKENS]
        if key.shape[TOKENS] != tokens:  # of another sequence, which every rank has whole
            if is_causal:
                raise self._error(
                    f"asks for causal attention of {tokens} queries to {key.shape[TOKENS]} keys: to which of them is "
                    "not clear where queries are cut"
                )
            mask = self._rows(attn_mask, tokens, key.shape[TOKENS])
            return F.scaled_dot_product_attention(query, key, value, mask, **named)
        if is_causal and attn_mask is not None:
            raise self._error("gives attention a mask and is_causal, of which torch takes one. Put both in the mask")
        mask = self._rows(attn_mask, tokens, tokens * len(self._spec.sizes))
        if self._way != "ring":
            return self._gathered(query, key, value, mask, is_causal, **named)
        if mask is not None and mask.requires_grad:
            raise self._error(
                "gives attention a mask that is learned, whose gradients a ring does not make. Choose "
                'context_parallel_configs = {"attention": "all_gather"}'
            )
        return self._attend_in_ring(query, key, value, mask, is_causal=is_causal, **named)

    def _attend_in_ring(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        is_causal: bool,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        kind = query.device.type
        has_autocast = torch.amp.is_autocast_available(kind)
        if has_autocast and torch.is_autocast_enabled(kind) and query.dtype != torch.float64:  # as torch's attention
            query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
        query = query if query.stride(-1) == 1 else query.contiguous()  # kernels take features one after the other
        shared = query.shape[:-3] if enable_gqa else query.shape[:TOKENS]
        key, value = (x.expand(*shared, *x.shape[len(shared) - query.dim() :]) for x in (key, value))
        spec = deal_tokens(self._spec, query.shape[TOKENS])
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        with torch.autocast(kind, enabled=False) if has_autocast else nullcontext():  # scores stay in float32
            return ring_attention(query, key, value, mask, RingCall(spec, scale, is_causal))

    def _gathered(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, **named: Any
    ) -> Tensor:
        tokens = query.shape[TOKENS]
        spec = deal_tokens(self._spec, tokens)
        key, value = (_gather(x, spec) for x in (key, value))
        if not is_causal:
            return F.scaled_dot_product_attention(query, key, value, mask, **named)
        count = tokens // 2 if spec.zigzag else tokens
        late = 2 * len(spec.sizes) - 1 - spec.index
        firsts = (spec.index * count, late * count) if spec.zigzag else (spec.start,)
        chunks = [
            self._causal_chunk(rows, key, value, first, **named)
            for rows, first in zip(query.split(count, TOKENS), firsts, strict=True)
        ]
        return torch.cat(chunks, TOKENS) if len(chunks) > 1 else chunks[0]

    def _causal_chunk(self, query: Tensor, key: Tensor, value: Tensor, first: int, **named: Any) -> Tensor:
        """Return the causal attention of consecutive queries, the first of which has this place in the sequence."""
        seen = first + query.shape[TOKENS]
        key, value = key.narrow(TOKENS, 0, seen), value.narrow(TOKENS, 0, seen)
        mask = self._causal_mask(query, seen) if first else None
        return F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, **named)

    def _causal_mask(self, query: Tensor, seen: int) -> Tensor:
        """Return the mask of queries that stand last among the keys they may see; one for all layers."""
        tokens = query.shape[TOKENS]
        # What is made for inference cannot be kept for a backward pass.
        looks = tokens, seen, query.dtype, query.device, torch.is_inference_mode_enabled()
        if looks not in self._causal_masks:
            while len(self._causal_masks) >= _MASKS:
                del self._causal_masks[next(iter(self._causal_masks))]
            hidden = torch.ones(tokens, seen, dtype=torch.bool, device=query.device).triu(seen - tokens + 1)
            mask = torch.zeros(tokens, seen, dtype=query.dtype, device=query.device).masked_fill(hidden, -torch.inf)
            self._causal_masks[looks] = mask
        return self._causal_masks[looks]

    def _rows(self, mask: Tensor | None, tokens: int, keys: int) -> Tensor | None:
        """Return the rows of a mask that are those of this rank's queries."""
        if mask is None or (mask.shape[-1] in (1, keys) and mask.dim() > 1 and mask.shape[-2] in (1, tokens)):
            return mask
        ranks = len(self._spec.sizes)
        if mask.dim() > 1 and mask.shape[-1] in (1, keys) and mask.shape[-2] == tokens * ranks:
            return deal_tokens(self._spec, tokens).part(mask, mask.dim() - 2)
        raise self._error(
            f"gives attention a mask of shape {tuple(mask.shape)}. It takes (..., {tokens * ranks} queries, {keys} "
            "keys): make it for whole sequences, outside of the module, or use is_causal"
        )


def _gather(x: Tensor, spec: ShardSpec) -> Tensor:
    """Return the keys or values of all tokens, in the order of the sequence."""
    gathered = collectives.all_gather(x, TOKENS, same_shapes=True, group=spec.group)
    return spec.join(gathered.split(spec.mine, TOKENS), TOKENS) if spec.zigzag else gathered
