"""`BufferView`: tensors as native buffers: address, length and dtype as the C++ core takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from phalanx.errors import ConfigError

TYPES: dict[torch.dtype, int] = {
    dtype: code
    for code, dtype in enumerate(
        (
            torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8, torch.int8, torch.int16,
            torch.int32, torch.int64, torch.bool,
        )
    )
}  # fmt: skip
"""Codes of `Type` in csrc/shm_reduce.h."""

_LINEAR = (ReduceOp.SUM, ReduceOp.AVG)
_OF_FRACTIONS = (*_LINEAR, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
_OF_WHOLES = (
    *_LINEAR, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR,
)  # fmt: skip
_OF_TRUTHS = tuple(op for op in _OF_WHOLES if op != ReduceOp.AVG)  # as NCCL
_BYTE = TYPES[torch.uint8]


class BufferView(NamedTuple):
    """The numbers of a contiguous tensor."""

    address: int
    length: int
    type: int


def to_move(tensor: Tensor) -> BufferView:
    """Return a contiguous tensor's numbers, of any dtype: one that the core does not know travels as bytes."""
    code = TYPES.get(tensor.dtype)
    if code is None:
        return BufferView(tensor.data_ptr(), tensor.numel() * tensor.element_size(), _BYTE)
    return BufferView(tensor.data_ptr(), tensor.numel(), code)


def to_reduce(tensor: Tensor, verb: str) -> BufferView:
    """Return a contiguous tensor's numbers; complex ones as their parts.

    Raises:
        ConfigError: If numbers of this dtype cannot be reduced.
    """
    code, count = TYPES.get(tensor.dtype), tensor.numel()
    if code is None and tensor.is_complex():
        code, count = TYPES.get(tensor.dtype.to_real()), 2 * count
    if code is None:
        raise ConfigError(f"{verb} has no kernel for {tensor.dtype}. Convert the tensor, or use backend='gloo'.")
    return BufferView(tensor.data_ptr(), count, code)


def reduction(op: Any, tensor: Tensor, verb: str) -> int:
    """Return the code of torch's operation, which is that of `Reduce` in csrc/shm_reduce.h.

    Raises:
        ConfigError: If it cannot be taken of this dtype.
    """
    kind = getattr(op, "op", op)
    reductions: tuple[Any, ...] = _LINEAR
    if not tensor.is_complex():
        reductions = _OF_TRUTHS if tensor.dtype is torch.bool else _OF_WHOLES
        reductions = _OF_FRACTIONS if tensor.is_floating_point() else reductions
    if kind not in reductions:
        raise ConfigError(f"{verb} cannot take {kind.name} of {tensor.dtype}. Choose another operation or dtype.")
    return int(kind)


class OutputBuffers:
    """Contiguous memory for tensors that will be filled: their own, or memory of ours that is copied over later."""

    def __init__(self, tensors: Sequence[Tensor], *, keep_values: bool = False) -> None:
        self.tensors = tensors
        self.memory = [t if t.is_contiguous() else _replacement(t, keep_values) for t in tensors]

    @property
    def then(self) -> Callable[[], None] | None:
        """What is to be done when the memory is filled."""
        return None if all(a is b for a, b in zip(self.tensors, self.memory, strict=True)) else self._copy

    def _copy(self) -> None:
        with torch.no_grad():
            for tensor, memory in zip(self.tensors, self.memory, strict=True):
                if tensor is not memory:
                    tensor.copy_(memory)


def _replacement(tensor: Tensor, keep_values: bool) -> Tensor:
    return tensor.contiguous() if keep_values else torch.empty_like(tensor, memory_format=torch.contiguous_format)


def copy_if_overlapping(tensor: Tensor, outputs: Sequence[Tensor]) -> Tensor:
    """Return a contiguous tensor, or a copy if an output overlaps it: an exchange may write before it reads."""
    start, end = _memory_range(tensor)
    overlaps = any(
        start < output_end and output_start < end for output_start, output_end in map(_memory_range, outputs)
    )
    return tensor.clone() if overlaps else tensor


def _memory_range(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def shares(tensor: Tensor, parts: Sequence[int], verb: str) -> list[BufferView]:
    """Return consecutive runs of a contiguous tensor's rows; `parts` are counts along dim 0.

    Raises:
        ConfigError: If the parts do not add up.
    """
    rows = tensor.shape[0] if tensor.dim() else 0
    if sum(parts) != rows or min(parts) < 0:
        raise ConfigError(
            f"{verb} needs split sizes, none negative, that add up to dim 0 of shape {tuple(tensor.shape)}, "
            f"found {list(parts)}. Correct them."
        )
    address, count, code = to_move(tensor)
    per_row = count // rows if rows else 0
    width = tensor.element_size() * tensor.numel() // count if count else 0
    runs = []
    for part in parts:
        runs.append(BufferView(address, part * per_row, code))
        address += part * per_row * width
    return runs


def even(whole: Tensor, part: Tensor, size: int, verb: str) -> list[int]:
    """Return the addresses of the `size` runs of `whole` that are as long as `part`.

    Raises:
        ConfigError: If `whole` is not as long as they are together, or the dtypes differ.
    """
    if whole.numel() != part.numel() * size or whole.dtype is not part.dtype:
        raise ConfigError(
            f"{verb} over {size} ranks needs one tensor {size} times as long as the other and of its dtype, found "
            f"shapes {tuple(whole.shape)} {whole.dtype} and {tuple(part.shape)} {part.dtype}. Correct them."
        )
    step = part.numel() * part.element_size()
    return [whole.data_ptr() + r * step for r in range(size)]


def require_fit(part: Tensor, parts: Sequence[Tensor], verb: str, size: int) -> None:
    """Raise unless the parts of the root, none elsewhere, are `size` of the length and dtype of `part`.

    Raises:
        ConfigError: If they are not.
    """
    if not parts or (len(parts) == size and all(p.numel() == part.numel() and p.dtype is part.dtype for p in parts)):
        return
    kinds = ", ".join(f"{tuple(p.shape)} {p.dtype}" for p in parts)
    raise ConfigError(
        f"{verb} needs {size} tensors of the length and dtype of {tuple(part.shape)} {part.dtype}, found {kinds}. "
        "Correct them."
    )
