"""`SquareSums`: sums of squares with the same bits however tensors are split over ranks.

Squares are rounded to multiples of a power of two so large that no sum of them is rounded; so are the remainders
(Demmel and Nguyen, "Fast Reproducible Floating-Point Summation", ARITH 2013). Sums are exact then, in any order: the
native core may use threads and vectors, and tensors on other devices have torch's operators, with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from phalanx.versions import HAS_NATIVE

_TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
"""Numbers of dtypes in the native core."""

_MOST = float(np.finfo(np.float64).max)


class SquareSums:
    """The sums of squares of some tensors, in two steps: their squares are rounded by the largest on all ranks.

    Args:
        tensors: What this rank has of each; at least one, any floating dtypes and devices. They must not change.
        native: Whether to use the native core for tensors on the CPU.
    """

    def __init__(self, tensors: Sequence[Tensor], *, native: bool = HAS_NATIVE) -> None:
        self._tensors, self._device = tensors, tensors[0].device
        self._arrays: tuple[list[int], list[int], list[int]] | None = None
        if native and all(map(_has_memory, tensors)):
            self._tensors = tensors = [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in tensors]
            self._arrays = (
                [tensor.data_ptr() for tensor in tensors],
                [tensor.numel() for tensor in tensors],
                [_TYPES[tensor.dtype] for tensor in tensors],
            )

    def largest(self) -> Tensor:
        """Return the largest magnitudes, shape (n,), float64, on the first device: of nothing 0, of a NaN that."""
        if self._arrays is None:
            largest = [
                t.detach().abs().max().double() if t.numel() else t.new_zeros(()).double() for t in self._tensors
            ]
            return torch.stack([value.to(self._device) for value in largest])
        result = np.empty(len(self._tensors))
        _core().largest_magnitudes(*self._arrays, torch.get_num_threads(), result)
        return torch.from_numpy(result)

    def counts(self) -> Tensor:
        """Return the numbers of elements, shape (n,), float64, on the first device."""
        counts = [tensor.numel() for tensor in self._tensors] if self._arrays is None else self._arrays[1]
        return torch.tensor(counts, dtype=torch.float64, device=self._device)

    def rounded(self, largest: Tensor, counts: Tensor) -> Tensor:
        """Return two sums for each tensor, shape (2, n), float64: of rounded squares, and of what rounding left.

        The sums of parts of a tensor add up to those of the tensor, without rounding, while squares are below 1e308.

        Args:
            largest: The largest magnitudes of the whole tensors, over all ranks, shape (n,), float64.
            counts: Their numbers of elements, likewise.
        """
        shifts = _shifts(largest.cpu().numpy(), counts.cpu().numpy())
        if self._arrays is None:
            columns = [_of_one(tensor, pair) for tensor, pair in zip(self._tensors, shifts.T.tolist(), strict=True)]
            return torch.stack([column.to(self._device) for column in columns], 1)
        result = np.empty_like(shifts)
        _core().square_sums(*self._arrays, torch.get_num_threads(), *shifts, *result)
        return torch.from_numpy(result)


def _has_memory(tensor: Tensor) -> bool:
    """Return whether the numbers lie at an address of this process; subclasses may only stand for other tensors."""
    return tensor.is_cpu and tensor.dtype in _TYPES and type(tensor) in (Tensor, nn.Parameter)


def _core() -> Any:
    from phalanx import _core

    return _core


def _shifts(largest: npt.NDArray[np.float64], counts: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return what to add and subtract, shape (2, n): 1.5 * 2**k leaves multiples of 2**(k - 52)."""
    with np.errstate(over="ignore", invalid="ignore"):
        tops = np.frexp(np.minimum(largest * largest, _MOST))[1]
    first = tops + np.frexp(counts)[1]
    exponents = np.stack([first, 2 * first - tops - 53])
    shifts: npt.NDArray[np.float64] = np.ldexp(1.5, np.clip(exponents, -1022, 1023))
    return shifts


def _of_one(tensor: Tensor, shifts: Sequence[float]) -> Tensor:
    rest, sums = tensor.detach().double().square(), []
    for shift in shifts:
        rounded = (rest + shift) - shift
        sums.append(rounded.sum())
        rest = rest - rounded
    return torch.stack(sums)
