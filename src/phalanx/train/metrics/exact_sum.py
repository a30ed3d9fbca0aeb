"""Sums whose result depends on no order, and what a metric may ask all ranks for.

A sum of floating-point numbers depends on the order in which they are added, so that N ranks would give the mean of
one process only nearly. Here a number is taken apart into mantissa and exponent, and mantissas are added as whole
numbers, a sum for each exponent (after Kulisch's long accumulator, "Computer Arithmetic and Validity", ch. 8). Adding
up is then exact, in any order and on any number of ranks; the result is rounded once, at the end.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from phalanx.comm import context
from phalanx.comm.collectives import all_gather, all_gather_list
from phalanx.comm.transfers import MAX_DIMS
from phalanx.errors import ConfigError
from phalanx.train.metrics.accuracy import sum_over_ranks

_MANTISSA_BITS = 53
_LOW_BITS = 27
_LOWEST = 1080
"""More than minus the exponent of the smallest number, 2**-1074."""

_EXPONENTS = _LOWEST + 1026
_SPECIAL = 3


class ExactSum:
    """The sum of float64 numbers, without rounding; up to 2**36 of them.

    `total` holds it: two whole numbers for each exponent (the high and low bits of mantissas), and how many numbers
    were NaN, inf and -inf. Totals of several ranks are added up element by element.
    """

    def __init__(self) -> None:
        self.total = torch.zeros(2 * _EXPONENTS + _SPECIAL, dtype=torch.int64)

    def add(self, values: Tensor) -> None:
        """Add all elements of a tensor of any shape and dtype."""
        wide = values.detach().reshape(-1).double()
        if self.total.device != wide.device:
            self.total = self.total.to(wide.device)
        is_finite = wide.isfinite()
        mantissa, exponent = torch.frexp(wide.masked_fill(~is_finite, 0))
        whole = (mantissa * 2.0**_MANTISSA_BITS).long()
        index = exponent.long() + _LOWEST
        self.total.index_add_(0, index, whole >> _LOW_BITS)
        self.total.index_add_(0, index + _EXPONENTS, whole & ((1 << _LOW_BITS) - 1))
        specials = torch.stack([wide.isnan().sum(), (wide == math.inf).sum(), (wide == -math.inf).sum()])
        self.total[-_SPECIAL:] += specials

    @staticmethod
    def value(total: Tensor) -> Fraction | float:
        """Return the sum that a `total` holds: a fraction; or NaN, inf or -inf."""
        counts = total.tolist()
        nan, above, below = counts[-_SPECIAL:]
        if nan or (above and below):
            return math.nan
        if above or below:
            return math.inf if above else -math.inf
        pairs = zip(counts[:_EXPONENTS], counts[_EXPONENTS : 2 * _EXPONENTS], strict=True)
        mantissas = sum(
            ((high << _LOW_BITS) + low) << exponent for exponent, (high, low) in enumerate(pairs) if high or low
        )
        return Fraction(mantissas, 1 << (_LOWEST + _MANTISSA_BITS))


def quotient(part: Fraction | float, whole: Fraction | float | int) -> float:
    """Return part / whole, rounded once; NaN where there is no such number, or it is no finite one."""
    if isinstance(part, Fraction) and isinstance(whole, Fraction | int):
        return float(part / whole) if whole else math.nan
    return float(part) / float(whole) if whole else math.nan


class AllRanks:
    """What `compute` of a metric may ask of all ranks that hold rows of their own; with one process, of that one.

    Its methods are collective: every rank calls them in the same order.
    """

    @property
    def count(self) -> int:
        """Number of ranks that hold rows of their own."""
        return context.current().readers.count if context.is_initialized() else 1

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum over all ranks, of a tensor of the same shape and dtype on each."""
        return sum_over_ranks(value.to(self._device(value)).clone()) if self.count > 1 else value

    def concat(self, rows: Tensor) -> Tensor:
        """Return the rows of all ranks along dim 0; ranks may hold different numbers of rows, also none."""
        return torch.cat(self.parts(rows)) if self.count > 1 else rows

    def parts(self, rows: Tensor) -> list[Tensor]:
        """Return the rows of each rank; one without rows need not know their dtype, nor the sizes of their other dims.

        Raises:
            ConfigError: If rows differ in their other dims; on all ranks alike.
        """
        if self.count == 1:
            return [rows]
        group = context.current().readers.group
        rows = rows.detach().to(self._device(rows))
        forms = all_gather(_form(rows).unsqueeze(0).to(rows.device), same_shapes=True, group=group).tolist()
        shape, dtype = next((_read_form(form) for form in forms if form[0]), (rows.shape[1:], rows.dtype))
        if not len(rows):
            rows = torch.empty(0, *shape, dtype=dtype, device=rows.device)
        return all_gather_list(rows.contiguous(), group=group)

    def _device(self, value: Tensor) -> torch.device:
        return context.current().device if context.is_initialized() else value.device


_NAME_LENGTH = 16


def _form(rows: Tensor) -> Tensor:
    """Return rows, dims, sizes of the other dims and dtype of a tensor as whole numbers."""
    sizes = list(rows.shape[1:])
    name = str(rows.dtype).removeprefix("torch.").ljust(_NAME_LENGTH)
    return torch.tensor([len(rows), len(sizes), *map(ord, name), *sizes, *[0] * (MAX_DIMS - len(sizes))])


def _read_form(form: list[int]) -> tuple[list[int], torch.dtype]:
    name = "".join(map(chr, form[2 : 2 + _NAME_LENGTH])).strip()
    return form[2 + _NAME_LENGTH :][: form[1]], getattr(torch, name)


@runtime_checkable
class GlobalMetric(Protocol):
    """A metric of all rows of a dataset that is more than a mean over rows; what `px.evaluate` takes as an object.

    class Hits:
        def reset(self):
            self.hits = torch.zeros((), dtype=torch.int64)
        def update(self, output, target):       # rows of this rank; each row of the data comes once, on one rank
            self.hits += (output.argmax(1) == target).sum()
        def compute(self, ranks):               # ranks.sum(tensor) and ranks.concat(rows)
            return int(ranks.sum(self.hits))
    """

    def reset(self) -> None:
        """Forget all rows."""
        ...

    def update(self, output: Any, target: Any, /) -> None:
        """Count the rows of a batch. Not collective: a rank may have fewer batches than others."""
        ...

    def compute(self, ranks: AllRanks, /) -> Any:
        """Return the metric over the rows of all ranks. Collective."""
        ...


class MeanOfRows:
    """The mean over all rows of what a function of (output, target) says of each.

    Whole numbers and yes-or-no are added up as such, others without rounding (`ExactSum`), so the mean is that of one
    process, to the last bit. A function that returns the mean of a batch is exact up to the rounding of those means.
    """

    def __init__(self, name: str, of_rows: Any) -> None:
        self._name, self.of_rows = name, of_rows
        self.reset()

    def reset(self) -> None:
        """Forget all rows."""
        self._whole, self._exact = torch.zeros((), dtype=torch.int64), ExactSum()
        self._rows = 0

    def update(self, output: Any, target: Any) -> None:
        """Add the rows of a batch."""
        rows = rows_in(output, target)
        value = values_of_rows(self._name, self.of_rows(output, target), rows)
        if value.is_floating_point():
            self._exact.add(value)
        else:
            self._whole = self._whole.to(value.device) + value.sum()
        self._rows += rows

    def compute(self, ranks: AllRanks) -> float:
        """Return the mean."""
        counts = torch.stack([self._whole, self._whole.new_tensor(self._rows)])
        totals = ranks.sum(torch.cat([self._exact.total, counts.to(self._exact.total.device)]))
        whole, rows = totals[-2:].tolist()
        exact = ExactSum.value(totals[:-2])
        return quotient(exact + whole, rows)


def rows_in(output: Any, target: Any) -> int:
    """Return the rows of a batch: those of the output, or of the first part of target and output that has some."""
    if isinstance(output, Tensor) and output.dim():
        return len(output)
    return next((len(leaf) for leaf in tree_leaves((target, output)) if isinstance(leaf, Tensor) and leaf.dim()), 0)


def values_of_rows(name: str, value: Any, rows: int) -> Tensor:
    """Return what adds up to the sum of a metric over the rows of a batch: int64 if it is whole, float64 otherwise.

    Args:
        name: The metric's, for messages.
        value: One value per row, shape (rows,) or (rows, 1), or their mean, no dimensions.
        rows: Rows of the batch.
    """
    if not isinstance(value, Tensor) or value.shape not in ((), (rows,), (rows, 1)):
        shape = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ConfigError(
            f"Metric {name!r} returned {shape} for {rows} rows. "
            "Return one value per row, or their mean without dimensions, as a tensor."
        )
    exact = value.double() if value.is_floating_point() or value.ndim == 0 else value.long()
    return exact * rows if value.ndim == 0 else exact
