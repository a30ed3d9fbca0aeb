"""`attend`: attention of queries to some of the keys, in a form that can be merged with that to the others.

Attention to a part of the keys is a mean of its values with weights that add up to 1, and the logarithm of the sum of
exponentials of its scores says how much the part counts among others (Milakov and Gimelshein, arXiv:1805.02867). The
backward pass needs of all other parts no more than the merged output and logarithm (Dao et al., arXiv:2205.14135,
appendix B.2).

Letters in shapes: B any dims before, H heads, T queries, S keys, D features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_SCORE_BYTES = 64 * 2**20
"""Bytes of scores that are held at once, where torch has no kernel that returns the logarithm."""

_KERNEL_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class PartialAttention(NamedTuple):
    """What queries got from some of the keys."""

    output: Tensor
    """(B, H, T, D)."""

    log_sum: Tensor
    """(B, H, T): of exponentials of scores; minus infinity where a query may see none of the keys."""


class Grads(NamedTuple):
    """Gradients of what attention read."""

    query: Tensor
    key: Tensor
    value: Tensor


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, *, is_causal: bool
) -> PartialAttention:
    """Return attention to these keys alone.

    Args:
        query: (B, H, T, D).
        key: (B, H, S, D), or fewer heads, each for as many consecutive heads of queries.
        value: As `key`; the number of features may differ.
        mask: (..., T, S) or what broadcasts to it: bool, true where a query sees a key, or a number to add to scores.
        scale: Factor of scores.
        is_causal: Whether query t sees the keys up to t only; then S is T.
    """
    key, value = _of_all_heads(key, query), _of_all_heads(value, query)
    if _has_kernel(query, key, value, mask):
        return PartialAttention(*_flash(query, key, value, 0.0, is_causal, scale=scale))
    outputs, log_sums = [], []
    for first, rows in _row_blocks(query, key):
        scores = _scores(query.narrow(-2, first, rows), key, _rows_of(mask, first, rows), scale, is_causal, first)
        log_sum = scores.logsumexp(-1)
        weights = (scores - _finite(log_sum).unsqueeze(-1)).exp()
        outputs.append((weights @ value.to(weights.dtype)).to(query.dtype))
        log_sums.append(log_sum)
    return PartialAttention(torch.cat(outputs, -2), torch.cat(log_sums, -1))


def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    merged: PartialAttention,
    scale: float,
    *,
    is_causal: bool,
) -> Grads:
    """Return what these keys add to the gradients of queries, and their own gradients.

    Args:
        grad: Gradient of the merged output, its shape.
        query: As in `attend`.
        key: As in `attend`.
        value: As in `attend`.
        mask: As in `attend`.
        merged: Output and logarithm of the attention to all keys.
        scale: As in `attend`.
        is_causal: As in `attend`.
    """
    heads = key.shape[-3] if key.dim() > 2 else 1
    key, value = _of_all_heads(key, query), _of_all_heads(value, query)
    if _has_kernel(query, key, value, mask):
        grads = _flash_backward(grad, query, key, value, *merged, 0.0, is_causal, scale=scale)
    else:
        grads = _plain_backward(grad, query, key, value, mask, merged, scale, is_causal=is_causal)
    to_query, to_key, to_value = grads
    return Grads(to_query, _sum_of_heads(to_key, heads), _sum_of_heads(to_value, heads))


def merge(first: PartialAttention, other: PartialAttention) -> PartialAttention:
    """Return attention to the keys of both; outputs in the dtype of the logarithms, which loses no digits."""
    log_sum = torch.logaddexp(first.log_sum, other.log_sum)
    terms = (part.output * (part.log_sum - _finite(log_sum)).exp().unsqueeze(-1) for part in (first, other))
    return PartialAttention(next(terms) + next(terms), log_sum)


def _flash(*inputs: object, scale: float) -> tuple[Tensor, Tensor]:
    output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*inputs, scale=scale)
    return output, log_sum


def _flash_backward(*inputs: object, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, scale=scale)
    return grads[0], grads[1], grads[2]


def _has_kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Return whether torch has a kernel for this that returns the logarithm."""
    is_plain = query.dim() == 4 and key.shape == value.shape and query.shape[-1] == key.shape[-1]
    return mask is None and is_plain and query.device.type == "cpu" and query.dtype in _KERNEL_DTYPES


def _plain_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    merged: PartialAttention,
    scale: float,
    *,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    to_query = []
    to_key, to_value = (torch.zeros_like(x, dtype=merged.log_sum.dtype) for x in (key, value))
    for first, rows in _row_blocks(query, key):
        mine, grad_rows = query.narrow(-2, first, rows), grad.narrow(-2, first, rows).to(to_key.dtype)
        scores = _scores(mine, key, _rows_of(mask, first, rows), scale, is_causal, first)
        weights = (scores - _finite(merged.log_sum.narrow(-1, first, rows)).unsqueeze(-1)).exp()
        to_value += weights.mT @ grad_rows
        along = (grad_rows * merged.output.narrow(-2, first, rows)).sum(-1, keepdim=True)
        to_scores = weights * (grad_rows @ value.to(to_key.dtype).mT - along) * scale
        to_query.append(to_scores @ key.to(to_key.dtype))
        to_key += to_scores.mT @ mine.to(to_key.dtype)
    return torch.cat(to_query, -2), to_key, to_value


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, scale: float, is_causal: bool, first: int) -> Tensor:
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = (query.to(wide) * scale) @ key.to(wide).mT
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(first + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask


def _row_blocks(query: Tensor, key: Tensor) -> list[tuple[int, int]]:
    """Return first rows and numbers of rows of blocks of queries whose scores are held at once."""
    tokens, item = query.shape[-2], 8 if query.dtype == torch.float64 else 4
    of_one = query.shape[:-2].numel() * key.shape[-2] * item
    at_once = max(1, _SCORE_BYTES // max(1, of_one))
    return [(first, min(at_once, tokens - first)) for first in range(0, tokens, at_once)]


def _rows_of(mask: Tensor | None, first: int, rows: int) -> Tensor | None:
    return mask if mask is None or mask.shape[-2] == 1 else mask.narrow(-2, first, rows)


def _finite(log_sum: Tensor) -> Tensor:
    """Return logarithms that can be subtracted from minus infinity."""
    return log_sum.masked_fill(log_sum == -torch.inf, 0.0)


def _of_all_heads(x: Tensor, query: Tensor) -> Tensor:
    """Return keys or values with one head for each of the queries."""
    if x.dim() < 3 or x.shape[-3] == query.shape[-3]:
        return x
    return x.repeat_interleave(query.shape[-3] // x.shape[-3], -3)


def _sum_of_heads(grad: Tensor, heads: int) -> Tensor:
    if grad.dim() < 3 or grad.shape[-3] == heads:
        return grad
    total: Tensor = grad.unflatten(-3, (heads, -1)).sum(-3)
    return total
