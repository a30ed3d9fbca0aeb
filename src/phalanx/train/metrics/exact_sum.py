"""`ExactSum`: floating-point sums that do not depend on the order.

A sum of floating-point numbers depends on the order in which they are added, so that N ranks would give the mean of
one process only nearly. Here a number is split into mantissa and exponent, and mantissas are added as
integers, one sum for each exponent (after Kulisch's long accumulator, "Computer Arithmetic and Validity", ch. 8).
Adding up is then exact, in any order and on any number of ranks; the result is rounded once, at the end.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

_MANTISSA_BITS = 53
_LOW_BITS = 27
_LOWEST = 1080
"""More than minus the exponent of the smallest number, 2**-1074."""

_EXPONENTS = _LOWEST + 1026
_SPECIAL = 3


class ExactSum:
    """The sum of float64 numbers, without rounding; up to 2**36 of them.

    `total` holds it: two integers for each exponent (the high and low bits of mantissas), and how many numbers
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
