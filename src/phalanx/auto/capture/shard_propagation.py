"""`propagate`: which output dim is sharded when an operator's input dim is, without communication.

Each rule says when every part of the outputs can be computed from the same part of what is sharded and all of what is
not. An operator without a rule passes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeAlias

import torch

from phalanx.auto.capture.graph import Argument, Operator, Read


@dataclass(frozen=True, slots=True)
class ShardedDim:
    """A tensor in equal parts along one dimension."""

    dim: int
    parts: int
    """Any number of parts that divides this is possible."""

    repeats: int = 1
    """How often the parts follow one another: 1 is a plain shard, more where another dimension was merged before it."""


ShardedDims: TypeAlias = tuple[ShardedDim | None, ...]
"""How the outputs of an operator are sharded; None is replicated."""

_Find: TypeAlias = Callable[[Read], ShardedDim | None]
_Rule: TypeAlias = Callable[[Operator, _Find], ShardedDims | None]
_Moves: TypeAlias = Callable[[Operator, int], Sequence[int | None]]
"""Says where each of a number of dimensions goes; None if a shard of it does not pass."""


def propagate(operator: Operator, find: _Find) -> ShardedDims | None:
    """Return how the outputs are sharded when what an operator reads is; None if it cannot compute so, or is not known.

    Args:
        operator: One of torch's; those that were put together are not known.
        find: Says how a tensor that it reads is sharded.
    """
    if all(find(read) is None for read in operator.reads()):
        return (None,) * len(operator.outputs)
    name = operator.name.removeprefix("aten.").partition(".")[0]
    rule = _RULES.get(name)
    if rule is None and _is_pointwise(operator.name):
        rule = _pointwise
    if rule is None:
        return None
    dims = rule(operator, find)
    return dims if dims and all(sharded is None or sharded.parts > 1 for sharded in dims) else None


@cache
def _torch_operator(name: str) -> Any:
    """Return torch's operator of a name, or None."""
    operator: Any = torch.ops
    for part in name.split("."):
        operator = getattr(operator, part, None)
    return operator if isinstance(operator, torch._ops.OpOverload) else None


def _is_pointwise(name: str) -> bool:
    operator = _torch_operator(name)
    return operator is not None and torch.Tag.pointwise in operator.tags


def _shape(operator: Operator, output: int = 0) -> tuple[int, ...]:
    return operator.outputs[output].shape


def _argument(operator: Operator, name: str) -> Argument:
    """Return an argument by its name in torch's schema; its default if it was left out, None if there is none."""
    keywords = dict(operator.keywords)
    for at, argument in enumerate(_torch_operator(operator.name)._schema.arguments):
        if argument.name == name:
            value: Argument = operator.arguments[at] if at < len(operator.arguments) else argument.default_value
            return keywords.get(name, value)
    return None


def _dims(operator: Operator, name: str, sizes: int) -> list[int]:
    """Return dimensions that an argument names, counted from the front; all for None."""
    value = _argument(operator, name)
    if value is None:
        return list(range(sizes))
    dims = value if isinstance(value, tuple | list) else (value,)
    return [int(dim) % max(sizes, 1) for dim in dims if isinstance(dim, int)]


def _shard_outputs(operator: Operator, sharded: ShardedDim | None) -> ShardedDims | None:
    """Shard all outputs that have a dimension of the first one's size; others are replicated."""
    if sharded is None:
        return None
    size = _shape(operator)[sharded.dim]
    return tuple(sharded if o.shape[sharded.dim : sharded.dim + 1] == (size,) else None for o in operator.outputs)


def _follows(read: Read, sharded: ShardedDim | None, target: ShardedDim, sizes: int) -> bool:
    """Return whether a read, lined up at the last dimension, is sharded as the outputs are, or not at all."""
    at = target.dim - (sizes - len(read.value.shape))
    if at < 0 or read.value.shape[at] == 1:
        return sharded is None
    return sharded is not None and (sharded.dim, sharded.repeats) == (at, target.repeats)


def _common_dim(operator: Operator, find: _Find, sizes: int) -> ShardedDim | None:
    """Return how tensors, lined up at the last dimension, are all sharded."""
    reads = [(read, find(read)) for read in operator.reads()]
    target = next(
        ShardedDim(sharded.dim + sizes - len(r.value.shape), sharded.parts, sharded.repeats)
        for r, sharded in reads
        if sharded
    )
    if not all(_follows(read, sharded, target, sizes) for read, sharded in reads):
        return None
    return replace(target, parts=_parts(sharded for _, sharded in reads))


def _parts(sharded_dims: Iterable[ShardedDim | None]) -> int:
    return math.gcd(*(sharded.parts for sharded in sharded_dims if sharded))


def _pointwise(operator: Operator, find: _Find) -> ShardedDims | None:
    return _shard_outputs(operator, _common_dim(operator, find, len(_shape(operator))))


def _follow_first(to: _Moves) -> _Rule:
    """Make a rule that moves a dimension of what is read first; all the rest is replicated."""

    def rule(operator: Operator, find: _Find) -> ShardedDims | None:
        first, *rest = operator.reads()
        sharded = find(first)
        if sharded is None or any(map(find, rest)):
            return None
        dim = to(operator, len(first.value.shape))[sharded.dim]
        return None if dim is None else _shard_outputs(operator, replace(sharded, dim=dim))

    return rule


def _transpose(operator: Operator, sizes: int) -> list[int | None]:
    order: list[int | None] = list(range(sizes))
    named = _argument(operator, "dim0") is not None
    first, second = (*_dims(operator, "dim0", sizes), *_dims(operator, "dim1", sizes)) if named else (0, sizes - 1)
    order[first], order[second] = order[second], order[first]
    return order


def _permute(operator: Operator, sizes: int) -> list[int | None]:
    order = _dims(operator, "dims", sizes)
    return [order.index(dim) for dim in range(sizes)]


def _unsqueeze(operator: Operator, sizes: int) -> list[int | None]:
    (new,) = _dims(operator, "dim", sizes + 1)
    return [dim + (dim >= new) for dim in range(sizes)]


def _without(operator: Operator, sizes: int) -> list[int | None]:
    """Pass all dimensions but those worked on, which may be gone afterwards."""
    worked_on = _dims(operator, "dim", sizes)
    left = [dim for dim in range(sizes) if len(_shape(operator)) == sizes or dim not in worked_on]
    return [None if dim in worked_on else left.index(dim) for dim in range(sizes)]


def _squeeze(operator: Operator, sizes: int) -> list[int | None]:
    shape, squeezed = next(operator.reads()).value.shape, _dims(operator, "dim", sizes)
    left = [dim for dim in range(sizes) if dim not in squeezed or shape[dim] != 1]
    return [left.index(dim) if dim in left else None for dim in range(sizes)]


def _expand(operator: Operator, sizes: int) -> list[int | None]:
    before, after = next(operator.reads()).value.shape, _shape(operator)
    more = len(after) - sizes
    return [dim + more if before[dim] == after[dim + more] else None for dim in range(sizes)]


def _leading(last: Callable[[Operator], int]) -> _Moves:
    """Pass all dimensions but the last few."""
    return lambda operator, sizes: [dim if dim < sizes - last(operator) else None for dim in range(sizes)]


def _length(name: str) -> Callable[[Operator], int]:
    return lambda operator: len(part) if isinstance(part := _argument(operator, name), tuple) else 0


def _reshape(operator: Operator, find: _Find) -> ShardedDims | None:
    """Find the dimension in which the same parts of memory are: as many numbers lie before it, or in it, as before."""
    (read,), after = operator.reads(), _shape(operator)
    sharded = find(read)
    assert sharded is not None
    starts = math.prod(read.value.shape[: sharded.dim]) * sharded.repeats
    before = [math.prod(after[:dim]) for dim in range(len(after))]
    dim = max((dim for dim, start in enumerate(before) if start <= starts and after[dim] > 1), default=None)
    if dim is None or starts % before[dim] or after[dim] % (repeats := starts // before[dim]):
        return None
    return (ShardedDim(dim, math.gcd(sharded.parts, after[dim] // repeats), repeats),)


def _concatenate(operator: Operator, find: _Find) -> ShardedDims | None:
    sizes = len(_shape(operator))
    # torch takes an empty vector beside tensors of any shape, and leaves it out: so caches of keys and values begin.
    reads = [read for read in operator.reads() if read.value.shape != (0,) or sizes == 1]
    (dim,) = _dims(operator, "dim", sizes)
    is_new = sizes > len(reads[0].value.shape)  # stack makes a dimension, cat joins along one
    sharded_dims = {find(read) for read in reads}
    sharded = sharded_dims.pop()
    if sharded_dims or sharded is None or (sharded.dim == dim and not is_new):
        return None
    return (replace(sharded, dim=sharded.dim + (is_new and sharded.dim >= dim)),)


def _product(operator: Operator, find: _Find) -> ShardedDims | None:
    """Rows of the first factor, columns of the second, or single products of many; with or without a sum before."""
    *added, left, right = operator.reads()
    left_dim, right_dim, sizes = find(left), find(right), len(_shape(operator))
    target = next(
        (sharded for sharded, dim in ((left_dim, sizes - 2), (right_dim, sizes - 1)) if sharded and sharded.dim == dim),
        None,
    )
    if left_dim and right_dim:
        many = sizes == 3 and (left_dim.dim, left_dim.repeats) == (0, right_dim.repeats) and right_dim.dim == 0
        target = left_dim if many else None
    if target is None or not all(_follows(read, find(read), target, sizes) for read in added):
        return None
    return (replace(target, parts=_parts(map(find, operator.reads()))),)


def _attention(operator: Operator, find: _Find) -> ShardedDims | None:
    """Rows and heads of queries, keys and values, and of a mask that has them."""
    dim = _common_dim(operator, find, 4)
    return _shard_outputs(operator, dim) if dim and dim.dim < 2 else None


def _embedding(operator: Operator, find: _Find) -> ShardedDims | None:
    table, ids = map(find, operator.reads())
    if table and not ids and table.dim == 1:
        return (replace(table, dim=len(_shape(operator)) - 1),)
    return (ids,) if ids and not table else None


def _batch_norm(operator: Operator, find: _Find) -> ShardedDims | None:
    # The statistics of a batch are those of all its rows.
    return None if _argument(operator, "training") else _rows(operator, find)


_rows: _Rule = _follow_first(lambda operator, sizes: [0, *(None for _ in range(sizes - 1))])

_RULES: dict[str, _Rule] = {
    name: rule
    for rule, names in (
        (_pointwise, "_to_copy clone copy_ copy empty_like zeros_like ones_like full_like rand_like fill_ zero_"),
        (_pointwise, "bernoulli bernoulli_ native_dropout hardswish hardswish_"),
        (_reshape, "view _unsafe_view reshape"),
        (_follow_first(_transpose), "t transpose"),
        (_follow_first(_permute), "permute"),
        (_follow_first(_unsqueeze), "unsqueeze"),
        (_follow_first(_squeeze), "squeeze"),
        (_follow_first(_expand), "expand"),
        (_follow_first(_without), "sum mean amax amin var var_mean any all argmax argmin sort topk cumsum"),
        (_follow_first(_without), "glu logsumexp prod cumprod linalg_vector_norm std"),
        (_follow_first(_without), "_softmax _log_softmax _safe_softmax slice select unbind split split_with_sizes"),
        (_follow_first(_leading(lambda _: 2)), "tril triu max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d"),
        (
            _follow_first(_leading(lambda _: 2)),
            "upsample_nearest2d upsample_bilinear2d reflection_pad2d replication_pad2d",
        ),
        (_follow_first(_leading(lambda _: 3)), "max_pool3d_with_indices avg_pool3d _adaptive_avg_pool3d pixel_shuffle"),
        (_follow_first(_leading(lambda operator: _length("pad")(operator) // 2)), "constant_pad_nd"),
        (_follow_first(_leading(_length("normalized_shape"))), "native_layer_norm _fused_rms_norm"),
        (_concatenate, "cat stack"),
        (_product, "mm addmm bmm baddbmm"),
        (_rows, "convolution native_group_norm"),
        (_batch_norm, "native_batch_norm cudnn_batch_norm _native_batch_norm_legit"),
        (_batch_norm, "_native_batch_norm_legit_no_training"),
        (_embedding, "embedding"),
        (_attention, "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu"),
        (_attention, "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention"),
        (_attention, "_scaled_dot_product_fused_attention_overrideable"),
    )
    for name in names.split()
}
